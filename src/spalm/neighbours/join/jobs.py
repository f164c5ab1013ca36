"""The blocks of a join as parts of a job: each is answered from files and leaves its answer as a file.

    work/keys, work/NAME            the ordered copies of keys and queries
    work/NAME.answers/NUMBER        of each query of the block: int64 position, int64 ids, float32 distances

Only one process writes the table itself: rows of a block lie all over it, and machines that share a file over a network
must not write into the same page of it.
"""

import hashlib
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int

from spalm.artifact import write_atomically
from spalm.compute import JobPart, ProgressCallback, SentByFields
from spalm.errors import InputError
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join.join import Found, Join, Plan, Queries
from spalm.neighbours.join.layout import Ordered
from spalm.neighbours.partitions import Partitions


@dataclass(frozen=True)
class Sides(SentByFields):
    """Who asks and what is asked, in files."""

    work: Path
    name: str
    """Of the queries; those that are entries themselves have no copy of their own."""
    partitions: Partitions
    width: int
    first_id: int | None
    """Entry of the query at position 0, where the queries are entries."""
    count: int
    room: int
    """Bytes of mapped files in memory at a time."""

    @cached_property
    def keys(self) -> Ordered:
        return self._ordered("keys")

    @cached_property
    def queries(self) -> Queries:
        own = self._ordered(self.name) if self.first_id is None else self.keys
        return Queries(own, self.first_id, self.count)

    def _ordered(self, name: str) -> Ordered:
        # Two ordered copies share the room.
        return Ordered(self.work / name, self.partitions, self.width, self.room // (2 if self.first_id is None else 1))


@dataclass(frozen=True)
class Answering(SentByFields):
    sides: Sides
    plan: Plan
    exclusion: Exclusion

    @property
    def folder(self) -> Path:
        return self.sides.work / f"{self.sides.name}.answers"

    @cached_property
    def join(self) -> Join:
        return Join(self.sides.keys, self.sides.queries, self.plan, self.exclusion)

    def __call__(self, part: JobPart, told: ProgressCallback) -> str:  # noqa: ARG002
        """Returns the digest of the answer. Doing it again changes nothing."""
        positions, found = self.join.block(part.first, part.last)
        content = b"".join(
            np.ascontiguousarray(array, dtype).tobytes()
            for array, dtype in ((positions, "<i8"), (found.ids, "<i8"), (found.distances, "<f4"))
        )
        write_atomically(self.folder / part.file_name, content, mark=f".{secrets.token_hex(4)}", sync=False)
        return hashlib.sha256(content).hexdigest()

    def collect(self, part: JobPart, digest: str) -> tuple[Int[np.ndarray, "queries"], Found]:
        """The positions and neighbours of a block that was answered; its file is not needed any more."""
        path, neighbours = self.folder / part.file_name, self.plan.neighbours
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise InputError(f"{path} is not what a worker wrote there; look at the storage, then run again")
        count = len(content) // (8 + 12 * neighbours)
        positions = np.frombuffer(content, "<i8", count)
        ids = np.frombuffer(content, "<i8", count * neighbours, 8 * count)
        distances = np.frombuffer(content, "<f4", count * neighbours, 8 * count * (1 + neighbours))
        path.unlink()
        return positions, Found(ids.reshape(count, -1), distances.reshape(count, -1))
