"""The shards of a memory: immutable files that hold the keys and the tokens of entries, one row for each.

SHARDS/N.keys      float16; there is no such file where the entries have no keys
SHARDS/N.tokens    int32
"""

import hashlib
import re
from collections.abc import Container
from functools import lru_cache
from mmap import MADV_RANDOM, MADV_WILLNEED
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int

from spalm.compute.mapping import advise, map_rows
from spalm.errors import DamagedError, InputError
from spalm.files import child, remove_leftovers, write_atomically

Column = Literal["keys", "tokens"]
"""Name of one of a shard's two files."""
SHARD_BYTES = 64 << 20
"""Size of a shard's keys or, without them, of its tokens. A kill while remembering loses the shards being made: one, or
one for each worker."""
NO_KEYS = ""
"""What the catalogue has in place of a digest for a shard whose entries have no keys."""
_MOST_MAPPED = 4096
"""Highest number of files that stay mapped while nothing reads them."""
_SHARD_FILE = re.compile(r"(\d{8,})\.(?:keys|tokens)")
"""Name of a shard's file."""


class Shards:
    """The folder of a memory's shards, whose keys have `width` numbers and whose tokens are below `vocabulary`."""

    def __init__(self, folder: Path, width: int, vocabulary: int):
        self.folder, self.width, self.vocabulary = folder, width, vocabulary
        self.formats: dict[Column, tuple[str, tuple[int, ...]]] = {"keys": ("<f2", (width,)), "tokens": ("<i4", ())}
        """Type of each column's numbers, and shape of a row."""
        self.mapped = lru_cache(maxsize=_MOST_MAPPED)(self._map)
        """Returns a shard's file as a memory-mapped array; the last ones used stay mapped."""

    def __reduce__(self) -> tuple:
        """Pickles only the path and the sizes: another process opens the files itself."""
        return Shards, (self.folder, self.width, self.vocabulary)

    def full_size(self, column: Column) -> int:
        """Returns the number of entries of a full shard whose largest file is that of `column`."""
        return max(1, SHARD_BYTES // self.bytes(column, 1))

    def path(self, column: Column, shard: int) -> Path:
        """Returns the path of one of a shard's files."""
        return self.folder / f"{shard:08d}.{column}"

    def bytes(self, column: Column, entries: int) -> int:
        """Returns the number of bytes that `entries` entries take in a file."""
        dtype, inner = self.formats[column]
        return entries * int(np.prod(inner, dtype=np.int64)) * np.dtype(dtype).itemsize

    def read(self, column: Column, shard: int, row: int, *, count: int) -> np.ndarray:
        """Returns `count` rows as a copy, so that reading a whole memory does not leave all of its files mapped."""
        dtype, inner = self.formats[column]
        if not count:
            return np.zeros((0, *inner), dtype)
        numbers = int(np.prod(inner, dtype=np.int64))
        path = self._existing(column, shard)
        found = np.fromfile(path, dtype, count * numbers, offset=self.bytes(column, row))
        if len(found) < count * numbers:
            raise self.too_short(column, shard)
        found = found.reshape(count, *inner)
        return self.known_tokens(found) if column == "tokens" else found

    def take(self, column: Column, shard: int, rows: Int[np.ndarray, "n"]) -> np.ndarray:
        """Returns any rows of a shard's file."""
        mapped = self.mapped(column, shard)
        if len(rows) and int(rows.max()) >= len(mapped):
            raise self.too_short(column, shard)
        return mapped[rows]

    def known_tokens(self, tokens: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns tokens that were read; refuses those outside of the vocabulary, which would index other memory."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise self._damaged(self.folder, "holds tokens that are not in the vocabulary")
        return tokens

    def _damaged(self, path: Path, what: str) -> DamagedError:
        """Returns the error that reports damage of a file."""
        return DamagedError(f"{path} {what}; `spalm verify {self.folder.parent}` tells what else is damaged")

    def prefetch(self, column: Column, shard: int, rows: Int[np.ndarray, "n"]) -> None:
        """Has the system read these rows from disk, all at once and nothing around them."""
        mapped = self.mapped(column, shard)
        address, size = mapped.ctypes.data, self.bytes(column, 1)
        advise(address, mapped.nbytes, MADV_RANDOM)
        for row in rows.tolist():
            advise(address + row * size, size, MADV_WILLNEED)

    def write(self, shard: int, keys: np.ndarray | None, tokens: np.ndarray) -> tuple[str, str]:
        """Puts a shard on disk, synced, and returns the digests of its files. It counts once the catalogue names it."""
        of_keys = NO_KEYS if keys is None else self._write("keys", shard, keys)
        return of_keys, self._write("tokens", shard, tokens)

    def _write(self, column: Column, shard: int, array: np.ndarray) -> str:
        """Writes one of a shard's files and returns its digest."""
        content = np.ascontiguousarray(array, self.formats[column][0]).tobytes()
        # A worker that was given up may still be writing the same shard.
        write_atomically(self.path(column, shard), content, shared=True)
        return hashlib.sha256(content).hexdigest()

    def remove_all_but(self, kept: Container[int]) -> None:
        """Removes the files of other shards, and what unfinished writes left."""
        for path in self.folder.iterdir():
            ours = _SHARD_FILE.fullmatch(path.name)
            if ours and int(ours[1]) not in kept:
                path.unlink()
        remove_leftovers(self.folder)

    def too_short(self, column: Column, shard: int) -> DamagedError:
        """Returns the error that reports a file with fewer rows than the catalogue says."""
        return self._damaged(self.path(column, shard), "is too short")

    def _existing(self, column: Column, shard: int) -> Path:
        """Returns the path of one of a shard's files; raises an error if the file is gone."""
        path = self.path(column, shard)
        if not child(self.folder, path.name).is_file():
            raise InputError(f"{path} is gone: the memory was compacted while it was read; run again")
        return path

    def _map(self, column: Column, shard: int) -> np.ndarray:
        """Returns one of a shard's files as a memory-mapped array."""
        try:
            return map_rows(self._existing(column, shard), *self.formats[column])
        except OSError as error:
            raise InputError(
                f"{error}; if the memory has very many shards, `spalm compact {self.folder.parent}` joins them"
            ) from None
