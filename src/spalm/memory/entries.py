"""The entries that a memory holds at one version: rows in the order of their ids, read from the shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from mmap import MADV_RANDOM, MADV_WILLNEED, PAGESIZE
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from spalm.errors import InputError

MISSING = -1
"""Stands for an entry, a row or a document that there is not."""

What = Literal["keys", "tokens"]


@dataclass(frozen=True)
class Documents:
    """The live documents by rising id of their first entry."""

    numbers: Int[np.ndarray, "documents"]
    first_ids: Int[np.ndarray, "documents"]
    entries: Int[np.ndarray, "documents"]
    names: list[str]

    def __len__(self) -> int:
        return len(self.numbers)

    def __reduce__(self) -> tuple:
        """To workers it goes without the names, which may be gigabytes: they ask for numbers only."""
        return Documents, (self.numbers, self.first_ids, self.entries, [])

    @cached_property
    def _ends(self) -> Int[np.ndarray, "documents"]:
        return self.first_ids + self.entries

    def index_of(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Which document an entry is of, MISSING for ids of none."""
        if not len(self):
            return np.full(np.shape(ids), MISSING)
        index = np.searchsorted(self.first_ids, ids, side="right") - 1
        inside = (index >= 0) & (ids < self._ends[index.clip(0)])
        return np.where(inside, index, MISSING)

    def numbers_of(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """The number of an entry's document, MISSING for ids of none."""
        index = self.index_of(ids)
        return np.where(index == MISSING, MISSING, self.numbers[index.clip(0)] if len(self) else MISSING)


@dataclass(frozen=True)
class EntrySource:
    """Where an entry comes from."""

    document: str
    offset: int
    """Position in the document, in tokens."""


class Entries:
    """A view of one version: what is remembered or forgotten later is not seen in it. A `compact` ends it."""

    def __init__(self, documents: Documents, runs: Int[np.ndarray, "runs 4"], shards: "Shards"):
        """`runs`: (first id, entries, shard, row in it), rising, of live entries only."""
        self.documents_held, self._runs, self._shards = documents, runs, shards
        self.width = shards.width
        self._ends = np.cumsum(runs[:, 1])
        self._starts = self._ends - runs[:, 1]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """The entries' ids."""
        return self.ids(np.arange(start, stop))

    def ids(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        run = np.searchsorted(self._ends, rows, side="right")
        return self._runs[run, 0] + rows - self._starts[run]

    def rows(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """The rows of entries, MISSING for ids that are not alive."""
        if not len(self):
            return np.full(np.shape(ids), MISSING)
        run = np.searchsorted(self._runs[:, 0], ids, side="right") - 1
        offset = ids - self._runs[run.clip(0), 0]
        alive = (run >= 0) & (offset < self._runs[run.clip(0), 1])
        return np.where(alive, self._starts[run.clip(0)] + offset, MISSING)

    def first_row(self, id: int) -> int:
        """The row of the first entry with this id or a higher one."""
        run = int(np.searchsorted(self._runs[:, 0] + self._runs[:, 1], id, side="right"))
        if run == len(self._runs):
            return len(self)
        return int(self._starts[run]) + max(0, id - int(self._runs[run, 0]))

    def gaps(self, upto: int) -> Int[np.ndarray, "ids"]:
        """The ids below `upto` that are not alive."""
        ends = np.concatenate([[0], self._runs[:, 0] + self._runs[:, 1]])
        begins = np.concatenate([self._runs[:, 0], [upto]])
        ranges = [np.arange(end, min(begin, upto)) for end, begin in zip(ends, begins) if begin > end]
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """A number for each entry's document."""
        return self.documents_held.numbers_of(self.labels(start, stop))

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        return self._read("keys", start, stop)

    def tokens(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """The entries' values: the tokens that came next."""
        return self._read("tokens", start, stop)

    def _read(self, what: What, start: int, stop: int) -> np.ndarray:
        parts = [self._shards.read(what, 0, 0, 0)]
        run = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            _, _, shard, row = self._runs[run]
            count = int(min(stop, self._ends[run]) - start)
            parts.append(self._shards.read(what, int(shard), int(row + start - self._starts[run]), count))
            start, run = start + count, run + 1
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        """Keys of any rows."""
        return self._take("keys", rows)

    def take_tokens(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        return self._take("tokens", rows)

    def tokens_of(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """The values of entries by their ids, MISSING for those that are not alive."""
        rows = self.rows(ids)
        if not len(self):
            return np.full(np.shape(ids), MISSING)
        return np.where(rows == MISSING, MISSING, self.take_tokens(rows.clip(0)))

    def fetch(self, rows: Int[np.ndarray, "n"]) -> None:
        """Has the system read the keys of these rows from disk, all of them at once and nothing around them.

        For memories larger than RAM: what is then taken is there, or on its way.
        """
        for shard, _, places in self._by_shard(rows):
            self._shards.fetch("keys", shard, places)

    def _take(self, what: What, rows: np.ndarray) -> np.ndarray:
        dtype, inner = self._shards.kinds[what]
        out = np.empty((*np.shape(rows), *inner), dtype)
        flat = out.reshape(-1, *inner)
        for shard, here, places in self._by_shard(rows):
            flat[here] = self._shards.mapped(what, shard)[places]
        return out

    def _by_shard(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(shard, which of the rows are in it, where in it they are)."""
        run = np.searchsorted(self._ends, rows, side="right").reshape(-1)
        shard, place = self._runs[run, 2], self._runs[run, 3] + np.reshape(rows, -1) - self._starts[run]
        order = np.argsort(shard, kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1) if len(order) else []:
            yield int(shard[here[0]]), here, place[here]

    def source(self, id: int) -> EntrySource | None:
        """The document and the place in it that an entry comes from; None if it is not alive."""
        index = int(self.documents_held.index_of(np.array(id)))
        if index == MISSING:
            return None
        return EntrySource(self.documents_held.names[index], id - int(self.documents_held.first_ids[index]))

    def around(self, id: int, before: int, after: int) -> Int[np.ndarray, "tokens"]:
        """The tokens of a live entry's document from `before` entries before it to `after` behind it."""
        index = int(self.documents_held.index_of(np.array(id)))
        first = int(self.documents_held.first_ids[index])
        last = first + int(self.documents_held.entries[index])
        ids = np.arange(max(first, id - before), min(last, id + after + 1))
        return self.take_tokens(self.rows(ids))


class Shards:
    """The files of a memory's shards."""

    def __init__(self, folder: Path, width: int):
        self.folder, self.width = folder, width
        self.kinds: dict[What, tuple[str, tuple[int, ...]]] = {"keys": ("<f2", (width,)), "tokens": ("<i4", ())}
        self.mapped = lru_cache(maxsize=256)(self._map)

    def __reduce__(self) -> tuple:
        """It goes to another process as a path."""
        return Shards, (self.folder, self.width)

    def path(self, what: What, shard: int) -> Path:
        return self.folder / f"{shard:08d}.{what}"

    def bytes(self, what: What, entries: int) -> int:
        dtype, inner = self.kinds[what]
        return entries * int(np.prod(inner, dtype=np.int64)) * np.dtype(dtype).itemsize

    def read(self, what: What, shard: int, row: int, count: int) -> np.ndarray:
        """Rows as a copy: reading a whole memory so does not fill this process's memory with mapped files."""
        dtype, inner = self.kinds[what]
        if not count:
            return np.zeros((0, *inner), dtype)
        numbers = int(np.prod(inner, dtype=np.int64))
        path = self._there(what, shard)
        found = np.fromfile(path, dtype, count * numbers, offset=self.bytes(what, row))
        if len(found) < count * numbers:
            raise InputError(f"{path} is too short; `spalm verify {self.folder.parent}` tells what else is damaged")
        return found.reshape(count, *inner)

    def fetch(self, what: What, shard: int, rows: Int[np.ndarray, "n"]) -> None:
        file = self.mapped(what, shard)._mmap
        file.madvise(MADV_RANDOM)
        size = self.bytes(what, 1)
        for first in (rows * size).tolist():
            begin = first // PAGESIZE * PAGESIZE
            file.madvise(MADV_WILLNEED, begin, first + size - begin)

    def _there(self, what: What, shard: int) -> Path:
        path = self.path(what, shard)
        if not path.exists():
            raise InputError(f"{path} is gone: the memory was compacted while it was read; run again")
        return path

    def _map(self, what: What, shard: int) -> np.ndarray:
        dtype, inner = self.kinds[what]
        path = self._there(what, shard)
        return np.memmap(path, dtype, "r", shape=(path.stat().st_size // self.bytes(what, 1), *inner))
