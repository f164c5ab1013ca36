"""Files mapped into memory without staying open: a process may map far more files than it may hold open."""

import ctypes
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np


def map_rows(path: Path, dtype: str, row: tuple[int, ...]) -> np.ndarray:
    """Returns the whole rows of this shape that a file holds, as an array that cannot be written.

    Raises an OSError if the file cannot be mapped.
    """
    import torch

    count = path.stat().st_size // (np.dtype(dtype).itemsize * int(np.prod(row, dtype=np.int64)))
    if not count:
        return np.zeros((0, *row), dtype)
    shape = (count, *row)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    try:
        # torch closes a file once it is mapped; Python's mmap keeps it open.
        content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be mapped: {error}") from None
    found = content.numpy().view(dtype).reshape(shape)
    found.flags.writeable = False
    return found


def advise(address: int, size: int, advice: int) -> None:
    """Tells the system how mapped memory will be read, by a constant of `mmap`. Advice not taken does no harm."""
    begin = address // PAGESIZE * PAGESIZE
    _madvise()(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), advice)


@cache
def _madvise() -> Any:
    return ctypes.CDLL(None, use_errno=True).madvise
