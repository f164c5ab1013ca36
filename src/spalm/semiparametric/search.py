"""Live searches of a memory: keys in, what was retrieved out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spalm.compute import half_of_machine_ram
from spalm.errors import InputError
from spalm.memory import Memory
from spalm.neighbours import Exclusion, Kind, Searcher, make_searcher, open_searcher
from spalm.semiparametric.retrieval import Retrieved, look_up

_RECALL, _JUDGED = 0.95, 64
"""Share of the nearest so many that an index must find."""
_QUERIES = 64
"""Searched for together: candidates of each are compared by whole keys."""
_FEW = 2000
"""Entries that are searched one by one faster than through an index."""


@dataclass(frozen=True)
class Search:
    searcher: Searcher
    count: int
    """Neighbours of a position."""
    below: int | None = None
    """Only entries with lower ids are found."""

    def __call__(self, keys: np.ndarray, own: np.ndarray | None = None) -> Retrieved:
        """With the ids of the keys, where they are entries themselves: nothing of their own documents."""
        return look_up(*self.find(keys, own), self.searcher.memory.entries())

    def find(self, keys: np.ndarray, own: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(ids, squared distances), nearest first."""
        exclusion = Exclusion(document=own is not None)
        found = [
            self.searcher.search(
                keys[start : start + _QUERIES].astype(np.float32),
                self.count,
                None if own is None else own[start : start + _QUERIES],
                exclusion,
                self.below,
            )
            for start in range(0, len(keys), _QUERIES)
        ]
        ids, distances = zip(*found)
        return np.concatenate(ids), np.concatenate(distances)


def open_search(memory: Memory, directory: Path, count: int) -> Search:
    """Through the index at `directory`, made now if there is none that fits. What was remembered since joins it."""
    try:
        searcher = open_searcher(memory, directory)[0]
    except InputError:
        kind = _kind_for(len(memory.entries()), memory.width)
        searcher = make_searcher(memory, kind, directory, _RECALL, min(count, _JUDGED), seed=1)[0]
    searcher.catch_up()
    return Search(searcher, count)


def _kind_for(entries: int, width: int) -> Kind:
    if entries <= _FEW:
        return "exact"
    return "faiss" if entries * (width + 8) < half_of_machine_ram() else "disk"
