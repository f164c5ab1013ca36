"""Large arrays in mapped files: disk space is reserved in advance, and memory is released once a file was read."""

import itertools
import mmap
import os
import shutil
from mmap import MADV_DONTNEED
from pathlib import Path
from typing import Literal

import numpy as np

from spalm.errors import InputError

_PAGE = mmap.PAGESIZE
_MORE = itertools.count()
"""Numbers that rise, where the system does not tell how much memory is in use."""


def map_array(path: Path, dtype: str, shape: tuple[int, ...], *, mode: Literal["c", "r+"] = "c") -> np.ndarray:
    """Returns an array in a file.

    Mode "c" is for reading: the array is writable, as torch requires, but the file would not change. Mode "r+" is for
    writing, and makes the file if there is none.
    """
    if not all(shape):
        path.touch()
        return np.zeros(shape, dtype)
    if mode == "r+" and not (path.exists() and path.stat().st_size):
        allocate(path, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, mode, shape=shape)


def allocate(path: Path, size: int) -> None:
    """Makes a file with all of its space reserved: a full disk is an error now, not a crash while it is written."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)


def release(*arrays: np.ndarray) -> None:
    """Releases the pages of mapped files, so that what was read no longer counts as memory of this process."""
    for array in arrays:
        if isinstance(array, np.memmap):
            array._mmap.madvise(MADV_DONTNEED)  # pyright: ignore[reportAttributeAccessIssue]


def resident_file_bytes() -> int:
    """Returns the bytes of mapped files, libraries among them, that count as memory of this process.

    Where the system does not tell, it is more than any bound, so that pages are released as often as it is looked.
    """
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # asked often
            return int(file.read().split()[2]) * _PAGE
    except OSError:
        return next(_MORE) << 50


def check_disk_space(directory: Path, needed: int, purpose: str) -> None:
    """Raises an error unless `directory` can grow to `needed` bytes, those that it holds already included."""
    already = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    free = shutil.disk_usage(directory).free
    if needed > free + already:
        raise InputError(
            f"{directory} has {free / 1e9:.1f} GB free, {purpose} needs up to {needed / 1e9:.1f} GB; "
            "make room or choose another --out"
        )


def boot_id() -> str:
    """Returns an id that changes when the machine restarts; always the same where the system has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""
