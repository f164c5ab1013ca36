"""The table of neighbours: for every position of a split, ids of entries and their squared distances, nearest first."""

from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from spalm.artifact import Artifact
from spalm.corpus import Split
from spalm.errors import InputError
from spalm.memory import Entries, Memory
from spalm.neighbours.kernels import MISSING

KIND = "neighbours"
VERSION = 1


def id_dtype(last: int) -> str:
    return "<i4" if last < 1 << 31 else "<i8"


class NeighbourTable(Artifact):
    """A finished table. Reading it needs the memory: entries forgotten since are not handed out."""

    def __init__(self, directory: Path | str, memory: Memory):
        super().__init__(directory, KIND)
        self.memory = memory
        lineage = self.facts["lineage"]
        if lineage != memory.lineage()[: len(lineage)]:
            raise InputError(
                f"{self.directory} was made with another memory than {memory.directory}; run `spalm neighbours` again"
            )

    def recall(self, split: Split) -> float:
        return self.facts["splits"][split]["recall"]

    def read(
        self, split: Split, positions: Int[np.ndarray, "n"]
    ) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
        """(ids, squared distances) of positions; where there is no neighbour, MISSING and infinity."""
        ids = self.array(f"{split}.ids")[positions].astype(np.int64)
        distances = self.array(f"{split}.distances")[positions]
        return without_the_forgotten(ids, distances, self.memory.entries())


def without_the_forgotten(
    ids: Int[np.ndarray, "n count"], distances: Float[np.ndarray, "n count"], entries: Entries
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """The neighbours that are alive, moved to the front."""
    return without(ids, distances, entries.rows(ids) < 0)


def without(
    ids: Int[np.ndarray, "n count"], distances: Float[np.ndarray, "n count"], dead: Bool[np.ndarray, "n count"]
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """The neighbours that are not dead, moved to the front."""
    if not dead.any():
        return ids, distances
    order = np.argsort(dead, axis=1, kind="stable")
    ids, distances = np.where(dead, MISSING, ids), np.where(dead, np.float32(np.inf), distances)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)
