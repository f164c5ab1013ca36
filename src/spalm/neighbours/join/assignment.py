"""The first pass of the partitioned layout: the projection, the norm and the partition of every row.

unordered/NUMBER    for each row: int32 partition, and relative to its centre: float32 |k|^2 / 2, vector in bfloat16
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt

from spalm.compute import JobPart, ProgressCallback, SentByFields, split_rows, unfinished_parts
from spalm.files import write_atomically
from spalm.neighbours.bfloat16 import from_pairs, to_pairs
from spalm.neighbours.parallel import Workers, chunks
from spalm.neighbours.partitions import Partitions
from spalm.neighbours.vectors import Vectors

PART = 1 << 14
"""Rows of one file."""
_AT_ONCE = 1 << 12
"""Rows that are held at a time: fixed, so that results do not depend on how the work is divided."""


@dataclass(frozen=True)
class AssignedRows:
    """Consecutive rows with their partitions, in the order of the vectors."""

    partition: Int[np.ndarray, "rows"]
    """Partition of each row."""
    half_norms: Float[np.ndarray, "rows"]
    """|k|^2 / 2 of each row, relative to its partition's centre."""
    scan: UInt[np.ndarray, "rows pairs"]
    """Vectors in the scan space relative to the centres, in bfloat16, two numbers together."""


@dataclass(frozen=True)
class AssignmentJob(SentByFields):
    """The job of assigning every vector to a partition, a file for each part."""

    vectors: Vectors
    partitions: Partitions
    folder: Path
    """Folder of the files."""

    @property
    def _pairs(self) -> int:
        """Pairs of numbers of a vector in the files."""
        return -(-self.partitions.space.width // 2)

    def run(self, workers: Workers, progress: ProgressCallback) -> None:
        """Makes the files that are missing; the rows of files that exist count as progress at once."""
        self.folder.mkdir(exist_ok=True)
        everything = split_rows(0, len(self.vectors), PART)
        left = unfinished_parts(everything, self.folder)
        progress(len(self.vectors) - sum(map(len, left)))
        for _ in workers.engine.run_parts(self, left, progress, threads=1, per_machine=workers.per_machine):
            pass

    def __call__(self, part: JobPart, progress: ProgressCallback) -> None:  # noqa: ARG002
        """Writes the file of a part."""
        pieces = [self._assign(*rows) for rows in chunks(part.first, part.last, _AT_ONCE)]
        content = b"".join(piece.tobytes() for column in zip(*pieces) for piece in column)
        write_atomically(self.folder / part.file_name, content, sync=False, shared=True)

    def _assign(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the partitions, half norms and vectors in the scan space of rows [first, last)."""
        vectors = self.partitions.space.project(self.vectors.keys(first, last))
        partition = self.partitions.assign(vectors.numpy())
        scan = to_pairs(vectors - torch.from_numpy(self.partitions.centres[partition]))
        half_norms = from_pairs(scan, vectors.shape[1]).square().sum(1).numpy() / 2
        return partition.astype("<i4"), half_norms.astype("<f4"), scan

    def rows(self, first: int, last: int) -> AssignedRows:
        """Reads rows [first, last) from the files."""
        found = [np.zeros(0, "<i4")], [np.zeros(0, "<f4")], [np.zeros((0, self._pairs), "<u4")]
        for part, begin, end in self._overlaps(first, last):
            columns = ("<i4", 0, 1), ("<f4", 4 * len(part), 1), ("<u4", 8 * len(part), self._pairs)
            for into, (dtype, offset, width) in zip(found, columns):
                size = width * np.dtype(dtype).itemsize
                read = np.fromfile(
                    self.folder / part.file_name, dtype, (end - begin) * width, offset=offset + begin * size
                )
                into.append(read.reshape(end - begin, *into[0].shape[1:]))
        return AssignedRows(*map(np.concatenate, found))

    def sizes(self, rows: int) -> Int[np.ndarray, "partitions"]:
        """Returns how many of the first `rows` rows belong to each partition."""
        count = np.zeros(len(self.partitions), np.int64)
        for part, begin, end in self._overlaps(0, rows):
            partition = np.fromfile(self.folder / part.file_name, "<i4", end - begin, offset=4 * begin)
            count += np.bincount(partition, minlength=len(self.partitions))
        return count

    def _overlaps(self, first: int, last: int) -> Iterator[tuple[JobPart, int, int]]:
        """Yields the parts that hold rows [first, last), each with the range of those rows within the part."""
        for part in split_rows(0, len(self.vectors), PART)[first // PART : -(-last // PART)]:
            yield part, max(first, part.first) - part.first, min(last, part.last) - part.first
