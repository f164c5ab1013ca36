"""The first pass of putting vectors in order, as parts of a job: every row's place in the space, and its partition.

unordered/NUMBER    of each row: int32 partition, float32 |k|^2 / 2, and where the space is smaller, float16 vector
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int

from spalm.artifact import write_atomically
from spalm.compute import Engine, JobPart, ProgressCallback, SentByFields, split_rows, unfinished_parts
from spalm.neighbours.partitions import Partitions
from spalm.neighbours.vectors import Vectors
from spalm.neighbours.workers import chunks

PART = 1 << 16
"""Rows of one file."""
_AT_ONCE = 1 << 14
"""Rows that are held at a time: fixed, so that results do not depend on who computes them."""


@dataclass(frozen=True)
class Assigned:
    """Some rows in their old order."""

    member: Int[np.ndarray, "rows"]
    half_norms: Float[np.ndarray, "rows"]
    scan: Float[np.ndarray, "rows width"]
    """Of no width where whole keys are scanned."""


@dataclass(frozen=True)
class Unordered(SentByFields):
    """The files of one pass over `vectors`."""

    vectors: Vectors
    partitions: Partitions
    folder: Path

    @property
    def _scanned(self) -> int:
        return self.partitions.space.width if self.partitions.space.reduced else 0

    def assign(self, engine: Engine, at_once: int, told: ProgressCallback) -> None:
        """Makes the files that are not there yet; `told` hears of those that are, too."""
        self.folder.mkdir(exist_ok=True)
        everything = split_rows(0, len(self.vectors), PART)
        left = unfinished_parts(everything, self.folder)
        told(len(self.vectors) - sum(map(len, left)))
        for _ in engine.run_parts(self, left, told, threads=1, per_machine=at_once):
            pass

    def __call__(self, part: JobPart, told: ProgressCallback) -> None:  # noqa: ARG002
        pieces = [self._assigned(*rows) for rows in chunks(part.first, part.last, _AT_ONCE)]
        content = b"".join(piece.tobytes() for column in zip(*pieces) for piece in column)
        write_atomically(self.folder / part.file_name, content, mark=f".{secrets.token_hex(4)}", sync=False)

    def _assigned(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        vectors = self.partitions.space.project(self.vectors.keys(first, last))
        rounded = vectors.half() if self._scanned else torch.zeros(len(vectors), 0).half()
        vectors = rounded.float() if self._scanned else vectors
        half_norms = vectors.square().sum(1).numpy() / 2
        return self.partitions.assign(vectors.numpy()).astype("<i4"), half_norms.astype("<f4"), rounded.numpy()

    def rows(self, first: int, last: int) -> Assigned:
        found = [np.zeros(0, "<i4")], [np.zeros(0, "<f4")], [np.zeros((0, self._scanned), "<f2")]
        for part, begin, end in self._overlaps(first, last):
            columns = ("<i4", 0, 1), ("<f4", 4 * len(part), 1), ("<f2", 8 * len(part), self._scanned)
            for into, (dtype, offset, width) in zip(found, columns):
                size = width * np.dtype(dtype).itemsize
                read = np.fromfile(
                    self.folder / part.file_name, dtype, (end - begin) * width, offset=offset + begin * size
                )
                into.append(read.reshape(end - begin, *into[0].shape[1:]))
        return Assigned(*map(np.concatenate, found))

    def sizes(self, rows: int) -> Int[np.ndarray, "partitions"]:
        """How many of the first `rows` belong to each partition."""
        count = np.zeros(len(self.partitions), np.int64)
        for part, begin, end in self._overlaps(0, rows):
            member = np.fromfile(self.folder / part.file_name, "<i4", end - begin, offset=4 * begin)
            count += np.bincount(member, minlength=len(self.partitions))
        return count

    def _overlaps(self, first: int, last: int) -> Iterator[tuple[JobPart, int, int]]:
        for part in split_rows(0, len(self.vectors), PART)[first // PART : -(-last // PART)]:
            yield part, max(first, part.first) - part.first, min(last, part.last) - part.first
