"""The blocks of a join as parts of a job: each block is read from files, and its neighbours are left as a file.

    work/keys, work/NAME            keys and queries in the partitioned layout
    work/NAME.answers/NUMBER        for each query of the block: int64 position, int64 ids, float32 distances

Only one process writes the table itself: rows of a block lie all over it, and machines that share a file over a network
must not write into the same page of it.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int

from spalm.compute import JobPart, ProgressCallback, SentByFields
from spalm.errors import InputError
from spalm.files import write_atomically
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join.join import Join, JoinPlan, JoinQueries, JoinTask, NearestEntries
from spalm.neighbours.join.layout import PartitionedVectors
from spalm.neighbours.partitions import Partitions
from spalm.neighbours.recall import HALF_PRECISION, Tolerance


@dataclass(frozen=True)
class JoinInputs(SentByFields):
    """Keys and queries of a join, as files in the partitioned layout."""

    work: Path
    """Folder of the files."""
    name: str
    """Name of the queries."""
    partitions: Partitions
    """Partitions by which the files are laid out."""
    width: int
    """Dimensions of a key."""
    first_id: int | None
    """Entry id of the query at position 0; None where the queries are not entries."""
    count: int
    """Number of queries."""
    room: int
    """Bytes of mapped files that may be in RAM at a time."""
    separate: bool
    """Whether the queries have files of their own."""
    dtype: str = "<f2"
    """Type of the numbers of a whole key."""

    @cached_property
    def keys(self) -> PartitionedVectors:
        """The keys, opened."""
        return self._open("keys")

    @cached_property
    def queries(self) -> JoinQueries:
        """The queries, opened."""
        own = self._open(self.name) if self.separate else self.keys
        return JoinQueries(own, self.first_id, self.count)

    def task(self, neighbours: int, exclusion: Exclusion, tolerance: Tolerance = HALF_PRECISION) -> JoinTask:
        """Returns the task of finding this many neighbours of every query."""
        return JoinTask(self.keys, self.queries, neighbours, exclusion, tolerance)

    def _open(self, name: str) -> PartitionedVectors:
        """Opens the keys, or the queries called `name`."""
        room = self.room // (2 if self.separate else 1)  # keys and queries share it
        return PartitionedVectors(self.work / name, self.partitions, self.width, dtype=self.dtype, room=room)


@dataclass(frozen=True)
class JoinJob(SentByFields):
    """The job of finding the neighbours of every query, a file for each block of queries."""

    inputs: JoinInputs
    """Keys and queries."""
    plan: JoinPlan
    """Plan by which the join searches."""
    exclusion: Exclusion
    """Rule by which entries are excluded from their own neighbours."""

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return self.inputs.work / f"{self.inputs.name}.answers"

    @cached_property
    def join(self) -> Join:
        """The join, with its files opened."""
        return Join(self.inputs.task(self.plan.neighbours, self.exclusion), self.plan)

    def __call__(self, part: JobPart, progress: ProgressCallback) -> str:  # noqa: ARG002
        """Writes the neighbours of a block and returns the digest of the file. Doing it again changes nothing."""
        positions, found = self.join.block(part.first, part.last)
        content = b"".join(
            np.ascontiguousarray(array, dtype).tobytes()
            for array, dtype in ((positions, "<i8"), (found.ids, "<i8"), (found.distances, "<f4"))
        )
        write_atomically(self.folder / part.file_name, content, sync=False, shared=True)
        return hashlib.sha256(content).hexdigest()

    def collect(self, part: JobPart, digest: str) -> tuple[Int[np.ndarray, "queries"], NearestEntries]:
        """Returns the positions and neighbours of a finished block, and removes its file."""
        path, neighbours = self.folder / part.file_name, self.plan.neighbours
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise InputError(f"{path} is not what a worker wrote there; look at the storage, then run again")
        count = len(content) // (8 + 12 * neighbours)
        positions = np.frombuffer(content, "<i8", count)
        ids = np.frombuffer(content, "<i8", count * neighbours, 8 * count)
        distances = np.frombuffer(content, "<f4", count * neighbours, 8 * count * (1 + neighbours))
        path.unlink()
        return positions, NearestEntries(ids.reshape(count, neighbours), distances.reshape(count, neighbours))
