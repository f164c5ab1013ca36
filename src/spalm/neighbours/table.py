"""The neighbour table: for every position of a split, ids of entries and their squared distances, nearest first."""

from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel

from spalm.artifact import Artifact
from spalm.corpus import Split
from spalm.errors import DamagedError, InputError
from spalm.memory import MISSING, Entries, Memory

KIND = "neighbours"
"""Kind of artifact."""
VERSION = 1
"""Version of the files' format."""


def id_dtype(last: int) -> str:
    """Returns the type in which entry ids up to `last` are stored."""
    return "<i4" if last < 1 << 31 else "<i8"


class _SplitFacts(BaseModel):
    recall: float | None


class _Facts(BaseModel):
    """The form of a table's facts."""

    lineage: list[str]
    splits: dict[Split, _SplitFacts]


class NeighbourTable(Artifact):
    """A finished neighbour table. Reading it needs the memory: entries forgotten since are left out."""

    def __init__(self, directory: Path | str, memory: Memory):
        super().__init__(directory, KIND, _Facts)
        self.memory = memory
        for split in self.facts["splits"]:
            ids, distances = self.array(f"{split}.ids"), self.array(f"{split}.distances")
            if ids.ndim != 2 or ids.shape != distances.shape or ids.dtype.kind != "i" or distances.dtype.kind != "f":
                raise DamagedError(f"{self.directory} is damaged (its arrays do not fit each other); make it again")
        lineage = self.facts["lineage"]
        if lineage != memory.lineage()[: len(lineage)]:
            raise InputError(
                f"{self.directory} was made with another memory than {memory.directory}; run `spalm neighbours` again"
            )

    def recall(self, split: Split) -> float:
        """Returns the recall that was measured on a sample of the split's positions."""
        return self.facts["splits"][split]["recall"]

    def read(
        self, split: Split, positions: Int[np.ndarray, "n"]
    ) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
        """Returns ids and squared distances; MISSING and infinity where there is no neighbour."""
        ids = self.array(f"{split}.ids")[positions].astype(np.int64)
        distances = self.array(f"{split}.distances")[positions]
        return drop_forgotten(ids, distances, self.memory.entries())


def drop_forgotten(
    ids: Int[np.ndarray, "n count"], distances: Float[np.ndarray, "n count"], entries: Entries
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """Returns the neighbours that are still in the memory, moved to the front."""
    return drop_neighbours(ids, distances, entries.rows(ids) < 0)


def drop_neighbours(
    ids: Int[np.ndarray, "n count"], distances: Float[np.ndarray, "n count"], dropped: Bool[np.ndarray, "n count"]
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """Returns the neighbours that are not dropped, moved to the front."""
    if not dropped.any():
        return ids, distances
    order = np.argsort(dropped, axis=1, kind="stable")
    ids, distances = np.where(dropped, MISSING, ids), np.where(dropped, np.float32(np.inf), distances)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)
