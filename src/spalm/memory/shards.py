"""The shards of a memory: immutable files that hold the keys and the tokens of entries, one row for each.

SHARDS/N.keys      float16; there is no such file where the entries have no keys
SHARDS/N.tokens    int32
"""

import hashlib
import os
import re
import secrets
from collections.abc import Container
from functools import lru_cache
from mmap import MADV_RANDOM, MADV_WILLNEED, PAGESIZE
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int

from spalm.artifact import TEMPORARY, write_atomically
from spalm.errors import InputError

Column = Literal["keys", "tokens"]
"""Name of one of a shard's two files."""
SHARD_BYTES = 64 << 20
"""Size of a shard's keys or, without them, of its tokens. A kill while remembering loses the shards being made: one, or
one for each worker."""
NO_KEYS = ""
"""What the catalogue has in place of a digest for a shard whose entries have no keys."""
_SHARD_FILE = re.compile(rf"(\d{{8,}})\.(?:keys|tokens)((?:\.[0-9a-f]+)?{re.escape(TEMPORARY)})?")
"""Name of a shard's file, finished or being written."""


class Shards:
    """The folder of a memory's shards, whose keys have `width` numbers."""

    def __init__(self, folder: Path, width: int):
        self.folder, self.width = folder, width
        self.formats: dict[Column, tuple[str, tuple[int, ...]]] = {"keys": ("<f2", (width,)), "tokens": ("<i4", ())}
        """Type of each column's numbers, and shape of a row."""
        self.mapped = lru_cache(maxsize=256)(self._map)
        """Returns a shard's file as a memory-mapped array; the last ones used stay mapped."""

    def __reduce__(self) -> tuple:
        """Pickles only the path and the width: another process opens the files itself."""
        return Shards, (self.folder, self.width)

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

    def read(self, column: Column, shard: int, row: int, count: int) -> np.ndarray:
        """Returns `count` rows as a copy, so that reading a whole memory does not leave all of its files mapped."""
        dtype, inner = self.formats[column]
        if not count:
            return np.zeros((0, *inner), dtype)
        numbers = int(np.prod(inner, dtype=np.int64))
        path = self._existing(column, shard)
        found = np.fromfile(path, dtype, count * numbers, offset=self.bytes(column, row))
        if len(found) < count * numbers:
            raise self.too_short(column, shard)
        return found.reshape(count, *inner)

    def prefetch(self, column: Column, shard: int, rows: Int[np.ndarray, "n"]) -> None:
        """Has the system read these rows from disk, all at once and nothing around them."""
        file = self.mapped(column, shard)._mmap  # pyright: ignore[reportAttributeAccessIssue]
        file.madvise(MADV_RANDOM)
        size = self.bytes(column, 1)
        for first in (rows * size).tolist():
            begin = first // PAGESIZE * PAGESIZE
            file.madvise(MADV_WILLNEED, begin, first + size - begin)

    def write(self, shard: int, keys: np.ndarray | None, tokens: np.ndarray) -> tuple[str, str]:
        """Puts a shard on disk, synced, and returns the digests of its files. It counts once the catalogue names it."""
        mark = f".{secrets.token_hex(4)}"  # a worker that was given up may still be writing the same shard
        of_keys = NO_KEYS if keys is None else self._write("keys", shard, keys, mark)
        digests = of_keys, self._write("tokens", shard, tokens, mark)
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)  # the catalogue must not name files whose own names a power cut can still undo
        os.close(folder)
        return digests

    def _write(self, column: Column, shard: int, array: np.ndarray, mark: str) -> str:
        """Writes one of a shard's files and returns its digest."""
        content = np.ascontiguousarray(array, self.formats[column][0]).tobytes()
        write_atomically(self.path(column, shard), content, mark=mark)
        return hashlib.sha256(content).hexdigest()

    def remove_all_but(self, kept: Container[int]) -> None:
        """Removes the files of other shards, and what unfinished writes left."""
        for path in self.folder.iterdir():
            ours = _SHARD_FILE.fullmatch(path.name)
            if ours and (ours[2] or int(ours[1]) not in kept):
                path.unlink()

    def too_short(self, column: Column, shard: int) -> InputError:
        """Returns the error that reports a file with fewer rows than the catalogue says."""
        path = self.path(column, shard)
        return InputError(f"{path} is too short; `spalm verify {self.folder.parent}` tells what else is damaged")

    def _existing(self, column: Column, shard: int) -> Path:
        """Returns the path of one of a shard's files; raises an error if the file is gone."""
        path = self.path(column, shard)
        if not path.exists():
            raise InputError(f"{path} is gone: the memory was compacted while it was read; run again")
        return path

    def _map(self, column: Column, shard: int) -> np.ndarray:
        """Returns one of a shard's files as a memory-mapped array."""
        dtype, inner = self.formats[column]
        path = self._existing(column, shard)
        return np.memmap(path, dtype, "r", shape=(path.stat().st_size // self.bytes(column, 1), *inner))
