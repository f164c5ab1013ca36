"""Search of a memory for live queries, through any index: results are live entries, ordered by whole keys.

Entries that were remembered after the index was made are searched exactly beside it, and forgotten ones are dropped:
an index need not be up to date for results to be right.
"""

import numpy as np
from jaxtyping import Float, Int

from spalm.memory import MISSING, Entries, Memory
from spalm.neighbours.exact import exact_search
from spalm.neighbours.exclusion import NOT_AN_ENTRY, ONLY_ITSELF, Exclusion, QueryExclusion
from spalm.neighbours.index.contract import Index
from spalm.neighbours.parallel import ParallelMap, chunks, serial_map

_MARGIN = 16
"""Candidates requested beyond those wanted, to replace forgotten ones and those that codes put in the wrong order."""
_MOST = 1 << 16
"""Largest number of candidates that are requested, however many of them are dead."""
_BLOCK = 1 << 16
"""Entries that are added to an index at a time."""


class Searcher:
    """Finds neighbours in a memory through an index, which holds the entries with ids below `next_id`."""

    def __init__(self, memory: Memory, index: Index, next_id: int, *, parallel: ParallelMap = serial_map):
        self.memory, self.index, self.next_id = memory, index, next_id
        self._parallel = parallel
        self.searched = 0
        """Number of queries so far."""

    def search(
        self,
        queries: Float[np.ndarray, "n width"],
        count: int,
        *,
        own: Int[np.ndarray, "n"] | None = None,
        exclusion: Exclusion = ONLY_ITSELF,
        below: int | None = None,
        entries: Entries | None = None,
    ) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
        """Returns ids and squared distances, nearest first; MISSING and infinity where there are not enough.

        `own` are the ids of queries that are entries: these do not find themselves. With `below`, only entries with
        lower ids are found, as if nothing had been remembered since. `entries` are those that are live, if they are
        known.
        """
        self.searched += len(queries)
        entries = (self.memory.entries() if entries is None else entries).with_keys
        excluded = None if own is None else query_exclusion(entries, own, exclusion)
        last = len(entries) if below is None else entries.first_row(below)
        recent = self._recent(queries, count, entries, excluded=excluded, last=last)
        ids = np.full((len(queries), count), MISSING, np.int64)
        distances = np.full(ids.shape, np.inf, np.float32)
        pending, wanted = np.arange(len(queries)), count + _MARGIN
        while True:
            proposed = self.index.candidates(queries[pending], wanted)
            usable = proposed if below is None else np.where(proposed < below, proposed, MISSING)
            every = np.concatenate([usable, recent[pending]], 1) if recent.shape[1] else usable
            if self.index.on_disk:
                self._fetch(every, entries)
            forbidden = None if excluded is None else excluded[pending]
            ids[pending], distances[pending] = _rank(
                queries[pending], every, count, entries=entries, excluded=forbidden
            )
            # If a query found too little although the index proposed as many candidates as requested, most of these
            # were dead or excluded: it requests more.
            short = (ids[pending, -1:] == MISSING).any(1)
            if short.any():
                short &= (proposed != MISSING).sum(1) >= wanted
            if not short.any() or proposed.shape[1] < wanted or wanted >= _MOST:
                return ids, distances
            pending, wanted = pending[short], 2 * wanted

    def _fetch(self, proposed: Int[np.ndarray, "n some"], entries: Entries) -> None:
        """Reads the keys of candidates from disk, all at once."""
        rows = entries.rows(np.unique(proposed))
        entries.prefetch(rows[rows >= 0])

    def _recent(
        self, queries, count: int, entries: Entries, *, excluded: QueryExclusion | None, last: int
    ) -> Int[np.ndarray, "n some"]:
        """Returns the ids of the nearest entries before row `last` that the index does not hold."""
        first = entries.first_row(self.next_id)
        if first >= last:
            return np.zeros((len(queries), 0), np.int64)
        rows, _ = exact_search(
            queries, _RowRange(entries, first, last), count, parallel=self._parallel, exclusion=excluded
        )
        return np.where(rows == MISSING, MISSING, entries.ids(np.where(rows == MISSING, 0, rows + first)))

    def catch_up(self) -> bool:
        """Adds to the index what was remembered since it was made, and deletes from it what was forgotten.

        Returns False if nothing can be added to this kind of index: then it should be built again when too many entries
        have to be searched exactly.
        """
        everything = self.memory.entries()
        entries = everything.with_keys
        end = len(entries)
        for start, stop in chunks(entries.first_row(self.next_id), end, _BLOCK):
            if not self.index.add(entries.labels(start, stop), entries.keys(start, stop)):
                return False
        self.next_id = max(self.next_id, int(entries.ids(np.array([end - 1]))[0]) + 1 if end else 0)
        if len(gaps := everything.gaps(self.next_id)):
            self.index.delete(gaps)
        return True


class _RowRange:
    """The rows of a memory from `first` to `last` - 1, with the interface `Vectors`."""

    def __init__(self, entries: Entries, first: int, last: int):
        self._entries, self._first, self._last = entries, first, last
        self.width = entries.width

    def __len__(self) -> int:
        return self._last - self._first

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        return self._entries.keys(self._first + start, self._first + stop)

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        return self._entries.take(self._first + rows)

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        return self._entries.labels(self._first + start, self._first + stop)

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        return self._entries.documents(self._first + start, self._first + stop)


def query_exclusion(entries: Entries, own: Int[np.ndarray, "n"], rule: Exclusion) -> QueryExclusion:
    """Returns what queries with these ids must not find; NOT_AN_ENTRY is the id of a query that is not an entry."""
    documents = entries.live_documents.numbers_of(own)
    return QueryExclusion(own, np.where(documents == MISSING, NOT_AN_ENTRY, documents), rule)


def _rank(
    queries: Float[np.ndarray, "n width"],
    proposed: Int[np.ndarray, "n some"],
    count: int,
    *,
    entries: Entries,
    excluded: QueryExclusion | None,
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """Returns the `count` nearest candidates, each once, without those that are dead or must not be found."""
    if excluded is not None and excluded.forbids_something:
        documents = entries.live_documents.numbers_of(proposed)
        forbidden = excluded.forbids(np.arange(len(queries))[:, None], proposed, documents)
        proposed = np.where(forbidden, MISSING, proposed)
    return entries.nearest(queries, proposed, count)
