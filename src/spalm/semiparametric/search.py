"""Live search of a memory: keys and contexts in, nearest contexts and exact matches out."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spalm.compute import half_of_machine_ram
from spalm.console import say
from spalm.errors import DamagedError, InputError
from spalm.memory import Entries, Memory
from spalm.memory.exact import ExactView, Excluded
from spalm.neighbours import Exclusion, IndexKind, IndexSettings, Searcher, make_searcher, open_searcher
from spalm.semiparametric.matched import Matched
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
        entries = self.searcher.memory.entries()
        return Retrieved.from_ids(*self.find(keys, own, entries=entries), entries)

    def find(
        self, keys: np.ndarray, own: np.ndarray | None = None, *, entries: Entries | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, squared distances), nearest first, among `entries`, by default the live ones."""
        exclusion = Exclusion() if own is None else self.exclusion
        found = [
            self.searcher.search(
                keys[start : start + _QUERIES].astype(np.float32),
                self.count,
                own=None if own is None else own[start : start + _QUERIES],
                exclusion=exclusion,
                below=self.below,
                entries=entries,
            )
            for start in range(0, len(keys), _QUERIES)
        ]
        ids, distances = zip(*found)
        return np.concatenate(ids), np.concatenate(distances)


@dataclass(frozen=True)
class MemorySearch:
    """A search of a memory's sources: nearest contexts, exact matches, or both."""

    memory: Memory
    nearest: Search | None
    """Finds nearest contexts; None: there are none."""
    exact: ExactView | None
    """Finds exact matches; None: there are none."""
    exclusion: Exclusion = OTHER_DOCUMENTS
    """Entries that a position must not match if it is an entry itself."""

    def __call__(self, keys: np.ndarray, contexts: np.ndarray, own: np.ndarray | None = None) -> Retrieved:
        """Returns what the memory has for positions with these keys and contexts.

        `own` holds the positions' ids if they are entries themselves; then exclusions apply.
        """
        found = Retrieved.empty(len(contexts)) if self.nearest is None else self.nearest(keys, own)
        return found if self.exact is None else replace(found, matched=self.matches(contexts, own))

    def matches(self, contexts: np.ndarray, own: np.ndarray | None = None) -> Matched:
        """Returns the exact matches of some contexts."""
        assert self.exact is not None
        return Matched.of(self.exact.find(contexts, None if own is None else self._excluded(own)))

    def _excluded(self, own: np.ndarray) -> Excluded:
        """Returns the entries that each of these must not match."""
        live = self.memory.entries().live_documents
        document = live.index_of(own)
        first = live.first_ids[document]
        last = first + live.entries[document]
        if self.exclusion.document:
            return Excluded(first, last)
        window = self.exclusion.window
        return Excluded(np.maximum(first, own - window), np.minimum(last, own + window + 1))


def open_search(memory: Memory, directory: Path, count: int) -> Search:
    """Returns a search through the index at `directory`, which is built if there is none that fits.

    Entries that were remembered since it was built are added to it.
    """
    try:
        searcher = open_searcher(memory, directory)[0]
    except InputError as error:
        if isinstance(error, DamagedError):
            say(f"{error}: that is done now")
        kind = _kind_for(len(memory.entries().with_keys), memory.width)
        settings = IndexSettings(kind=kind, recall=_RECALL, neighbours=min(count, _JUDGED))
        searcher = make_searcher(memory, directory, settings)[0]
    searcher.catch_up()
    return Search(searcher, count)


def _kind_for(entries: int, width: int) -> IndexKind:
    if entries <= _FEW:
        return "exact"
    return "faiss" if entries * (width + 8) < half_of_machine_ram() else "disk"
