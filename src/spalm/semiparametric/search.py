"""Live search of a memory: keys in, retrieved neighbours out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spalm.compute import half_of_machine_ram
from spalm.errors import InputError
from spalm.memory import Memory
from spalm.neighbours import Exclusion, IndexKind, IndexSettings, Searcher, make_searcher, open_searcher
from spalm.semiparametric.retrieval import Retrieved

_RECALL, _JUDGED = 0.95, 64
"""Share of the nearest neighbours that an index must find, and the number of nearest neighbours it is judged by."""
_QUERIES = 64
"""Number of queries searched at a time; the full keys of their candidates are held in RAM together."""
_FEW = 2000
"""Number of entries up to which exact search is faster than an index."""

OTHER_DOCUMENTS = Exclusion(document=True)
"""Exclusion of all entries of a query's own document."""


@dataclass(frozen=True)
class Search:
    """A search for the nearest entries of a memory."""

    searcher: Searcher
    count: int
    """Number of neighbours of each key."""
    below: int | None = None
    """Find only entries with lower ids than this."""
    exclusion: Exclusion = OTHER_DOCUMENTS
    """Entries that a key must not find if it is an entry itself."""

    def __call__(self, keys: np.ndarray, own: np.ndarray | None = None) -> Retrieved:
        """Returns the neighbours of some keys.

        `own` holds the keys' ids if they are entries themselves; `exclusion` then applies.
        """
        return Retrieved.from_ids(*self.find(keys, own), self.searcher.memory.entries())

    def find(self, keys: np.ndarray, own: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, squared distances), nearest first."""
        exclusion = Exclusion() if own is None else self.exclusion
        found = [
            self.searcher.search(
                keys[start : start + _QUERIES].astype(np.float32),
                self.count,
                own=None if own is None else own[start : start + _QUERIES],
                exclusion=exclusion,
                below=self.below,
            )
            for start in range(0, len(keys), _QUERIES)
        ]
        ids, distances = zip(*found)
        return np.concatenate(ids), np.concatenate(distances)


def open_search(memory: Memory, directory: Path, count: int) -> Search:
    """Returns a search through the index at `directory`, which is built if there is none that fits.

    Entries that were remembered since it was built are added to it.
    """
    try:
        searcher = open_searcher(memory, directory)[0]
    except InputError:
        kind = _kind_for(len(memory.entries()), memory.width)
        settings = IndexSettings(kind, _RECALL, min(count, _JUDGED), seed=1)
        searcher = make_searcher(memory, directory, settings)[0]
    searcher.catch_up()
    return Search(searcher, count)


def _kind_for(entries: int, width: int) -> IndexKind:
    if entries <= _FEW:
        return "exact"
    return "faiss" if entries * (width + 8) < half_of_machine_ram() else "disk"
