"""The live entries of a memory at one version: rows in the order of their ids, read from the shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from spalm.memory import kernels
from spalm.memory.shards import Column, Shards

_MappedRuns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Addresses, first rows, rows after the last, and rows in the files of all runs."""
MISSING = -1
"""Number that stands for an entry, a row or a document that does not exist."""
_BITS = 48
"""Number of bits of an id within its own memory."""


def joined_ids(number: int, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Returns ids of one of several memories, which have numbers, as ids that name the memory too.

    They are the ids in the memory itself plus 2^48 times its number. So those of number 0 stay what they are.
    """
    return np.where(ids == MISSING, MISSING, ids + (number << _BITS)) if number else ids


def divided_ids(ids: Int[np.ndarray, "*n"]) -> tuple[Int[np.ndarray, "*n"], Int[np.ndarray, "*n"]]:
    """Returns the numbers of the memories that ids name, MISSING where there is none, and the ids in them."""
    return ids >> _BITS, ids & ((1 << _BITS) - 1)


def divided_id(id: int) -> tuple[int, int]:
    """Returns the number of the memory that an id names, and the id in it."""
    return id >> _BITS, id & ((1 << _BITS) - 1)


@dataclass(frozen=True)
class LiveDocuments:
    """The documents that are remembered and not forgotten, by rising id of their first entry."""

    numbers: Int[np.ndarray, "documents"]
    """Number of each document in the catalogue."""
    first_ids: Int[np.ndarray, "documents"]
    """Id of each document's first entry."""
    entries: Int[np.ndarray, "documents"]
    """Number of each document's entries."""
    names: list[str]
    """Name of each document; empty in other processes."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __reduce__(self) -> tuple:
        """Pickles the documents without their names, which may be gigabytes: workers need only the numbers."""
        return LiveDocuments, (self.numbers, self.first_ids, self.entries, [])

    @cached_property
    def _ends(self) -> Int[np.ndarray, "documents"]:
        """Id after each document's last entry."""
        return self.first_ids + self.entries

    def index_of(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the index of the document that each entry belongs to, MISSING for ids that belong to none."""
        if not len(self):
            return np.full(np.shape(ids), MISSING)
        index = np.searchsorted(self.first_ids, ids, side="right") - 1
        inside = (index >= 0) & (ids < self._ends[index.clip(0)])
        return np.where(inside, index, MISSING)

    def numbers_of(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the number of the document that each entry belongs to, MISSING for ids that belong to none."""
        index = self.index_of(ids)
        return np.where(index == MISSING, MISSING, self.numbers[index.clip(0)] if len(self) else MISSING)


@dataclass(frozen=True)
class EntrySource:
    """The place that an entry comes from."""

    document: str
    """Name of the document."""
    offset: int
    """Position in the document, in tokens."""


class EntryLookup(Protocol):
    """What can be asked about entries by their ids, in one memory or in several that are joined."""

    live_documents: LiveDocuments
    """The documents that are remembered and not forgotten."""

    def rows(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the rows of entries, MISSING for ids that are not alive."""
        ...

    def tokens_of(self, ids: Int[np.ndarray, "*n"], *, missing: int = MISSING) -> Int[np.ndarray, "*n"]:
        """Returns the values of entries, `missing` for ids that are not alive."""
        ...


class Entries:
    """The live entries at one version. Later changes do not show, but compaction removes the files that it reads."""

    def __init__(
        self,
        documents: LiveDocuments,
        runs: Int[np.ndarray, "runs 4"],
        shards: Shards,
        *,
        without_keys: Sequence[int] = (),
    ):
        """`runs`: (first id, number of entries, shard, row in it) of live entries, by rising id.

        `without_keys`: the shards whose entries have no keys.
        """
        self.live_documents, self.runs, self._shards = documents, runs, shards
        self._keyless = np.isin(runs[:, 2], list(without_keys))
        self.width = shards.width
        """Number of dimensions of a key."""
        self._first_ids, self._counts = (np.ascontiguousarray(runs[:, column]) for column in (0, 1))
        self._after = runs[:, 0] + runs[:, 1]  # the id after each run
        self._ends = np.cumsum(runs[:, 1])
        self._starts = self._ends - runs[:, 1]
        self._addresses: dict[Column, _MappedRuns] = {}
        self._files: list[np.ndarray] = []

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the entries without addresses, which mean nothing in another process."""
        return {**self.__dict__, "_addresses": {}, "_files": []}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def with_keys(self) -> "Entries":
        """The entries that have keys, which are those that a search for nearest contexts can find."""
        return self if self._keyed is None else self._keyed

    @cached_property
    def _keyed(self) -> "Entries | None":
        """The entries that have keys; None if all have. A reference to itself would keep all files open for long."""
        if not self._keyless.any():
            return None
        return Entries(self.live_documents, self.runs[~self._keyless], self._shards)

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the ids of rows `start` to `stop`."""
        return self.ids(np.arange(start, stop))

    def ids(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the ids of any rows."""
        run = np.searchsorted(self._ends, rows, side="right")
        return self.runs[run, 0] + rows - self._starts[run]

    def rows(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the rows of entries, MISSING for ids that are not alive."""
        rows = np.empty(np.size(ids), np.int64)
        flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
        kernels.rows_of(flat, self._first_ids, self._counts, self._starts, MISSING, rows)
        return rows.reshape(np.shape(ids))

    def first_row(self, id: int) -> int:
        """Returns the row of the first entry with this id or a higher one."""
        run = int(np.searchsorted(self._after, id, side="right"))
        if run == len(self.runs):
            return len(self)
        return int(self._starts[run]) + max(0, id - int(self.runs[run, 0]))

    def gaps(self, upto: int) -> Int[np.ndarray, "ids"]:
        """Returns the ids below `upto` that are not alive."""
        ends = np.concatenate([[0], self._after])
        begins = np.concatenate([self.runs[:, 0], [upto]])
        ranges = [np.arange(end, min(begin, upto)) for end, begin in zip(ends, begins) if begin > end]
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the document numbers of rows `start` to `stop`."""
        return self.live_documents.numbers_of(self.labels(start, stop))

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        """Returns the keys of rows `start` to `stop`."""
        return self._read("keys", start, stop)

    def tokens(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the values of rows `start` to `stop`: the tokens that came next."""
        return self._read("tokens", start, stop)

    def _read(self, column: Column, start: int, stop: int) -> np.ndarray:
        """Returns a column of rows `start` to `stop`."""
        parts = [self._shards.read(column, 0, 0, count=0)]
        run = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            _, _, shard, row = self.runs[run]
            count = int(min(stop, self._ends[run]) - start)
            parts.append(self._shards.read(column, int(shard), int(row + start - self._starts[run]), count=count))
            start, run = start + count, run + 1
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        """Returns the keys of any rows."""
        return self._take("keys", rows)

    def take_tokens(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the values of any rows."""
        found = np.empty(np.size(rows), np.int32)
        kernels.take_tokens(*self._mapped("tokens"), np.ascontiguousarray(rows, np.int64).reshape(-1), found)
        return self._shards.known_tokens(found.reshape(np.shape(rows)))

    def nearest(
        self, queries: Float[np.ndarray, "n width"], proposed: Int[np.ndarray, "n some"], count: int
    ) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
        """Returns ids and squared distances of the `count` nearest entries among those proposed to each query.

        Each comes once, the nearest first, and at the same distance that with the lower id. Where not enough of them
        are alive, the rest is MISSING, at infinity.
        """
        ids = np.full((len(proposed), count), MISSING, np.int64)
        distances = np.full(ids.shape, np.inf, np.float32)
        proposed, queries = np.ascontiguousarray(proposed, np.int64), np.ascontiguousarray(queries, np.float32)
        mapped = self._mapped("keys")
        kernels.nearest(*mapped, self._first_ids, self._counts, proposed, queries, ids, distances)
        return ids, distances

    def _mapped(self, column: Column) -> _MappedRuns:
        """Returns where the runs are mapped, in the form that the compiled loops take."""
        if column not in self._addresses:
            shards, place = np.unique(self.runs[:, 2], return_inverse=True)
            files = [self._shards.mapped(column, shard) for shard in shards.tolist()]
            needed = self.runs[:, 3] + self.runs[:, 1]
            for index, file in enumerate(files):  # the loops do not check where they read
                if (needed[place == index] > len(file)).any() or (self.runs[place == index, 3] < 0).any():
                    raise self._shards.too_short(column, int(shards[index]))
            self._files += files  # they stay mapped as long as their addresses are used
            addresses = np.array([file.ctypes.data for file in files], np.uint64)[place]
            self._addresses[column] = addresses, self._starts, self._ends, np.ascontiguousarray(self.runs[:, 3])
        return self._addresses[column]

    def tokens_of(self, ids: Int[np.ndarray, "*n"], *, missing: int = MISSING) -> Int[np.ndarray, "*n"]:
        """Returns the values of entries by their ids, `missing` for those that are not alive."""
        found = np.full(np.shape(ids), missing)
        if len(self):
            addresses, _, _, first = self._mapped("tokens")
            flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
            highest = kernels.tokens_of(flat, self._first_ids, self._counts, addresses, first, found.reshape(-1))
            self._shards.known_tokens(np.array(highest))
        return found

    def prefetch(self, rows: Int[np.ndarray, "n"]) -> None:
        """Has the system read the keys of these rows from disk, all of them at once and nothing around them.

        For memories larger than RAM: `take` then finds the keys in RAM, or on the way there.
        """
        for shard, _, places in self._by_shard(rows):
            self._shards.prefetch("keys", shard, places)

    def _take(self, column: Column, rows: np.ndarray) -> np.ndarray:
        """Returns a column of any rows."""
        dtype, inner = self._shards.formats[column]
        out = np.empty((*np.shape(rows), *inner), dtype)
        flat = out.reshape(-1, *inner)
        for shard, here, places in self._by_shard(rows):
            flat[here] = self._shards.take(column, shard, places)
        return out

    def _by_shard(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (shard, indices of the rows that are in it, their places in it)."""
        run = np.searchsorted(self._ends, rows, side="right").reshape(-1)
        shard, place = self.runs[run, 2], self.runs[run, 3] + np.reshape(rows, -1) - self._starts[run]
        order = np.argsort(shard, kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1) if len(order) else []:
            yield int(shard[here[0]]), here, place[here]

    def source(self, id: int) -> EntrySource | None:
        """Returns the document and the place in it that an entry comes from; None if it is not alive."""
        index = int(self.live_documents.index_of(np.array(id)))
        if index == MISSING:
            return None
        return EntrySource(self.live_documents.names[index], id - int(self.live_documents.first_ids[index]))

    def around(self, id: int, before: int, after: int) -> Int[np.ndarray, "tokens"]:
        """Returns the tokens around a live entry, up to `before` before it and `after` after it, in its document."""
        index = int(self.live_documents.index_of(np.array(id)))
        first = int(self.live_documents.first_ids[index])
        last = first + int(self.live_documents.entries[index])
        ids = np.arange(max(first, id - before), min(last, id + after + 1))
        return self.take_tokens(self.rows(ids))


def overlapping_runs(first_ids: np.ndarray, counts: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Returns the parts of extents (first id, entries, shard, row) that belong to live documents."""
    # Documents that follow each other without a gap are one interval of ids.
    gaps = np.flatnonzero(first_ids[1:] != first_ids[:-1] + counts[:-1]) + 1
    begins = first_ids[np.concatenate([[0], gaps])] if len(first_ids) else first_ids
    ends = (first_ids + counts)[np.concatenate([gaps - 1, [-1]])] if len(first_ids) else first_ids
    runs = []
    for first, count, shard, row in extents.tolist():
        interval = int(np.searchsorted(ends, first, side="right"))
        while interval < len(begins) and begins[interval] < first + count:
            begin, end = max(first, int(begins[interval])), min(first + count, int(ends[interval]))
            if end > begin:
                runs.append((begin, end - begin, shard, row + begin - first))
            interval += 1
    return np.array(runs, np.int64).reshape(-1, 4)
