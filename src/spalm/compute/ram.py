"""Main memory: how much this machine has, sizes as users write them, and what the allocator does with freed blocks."""

import ctypes
import os
import re
import sys

from spalm.errors import InputError

_MOST = 1e18
"""Highest number of bytes: sizes are held in 64 bits."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str, option: str = "--ram") -> int:
    """Returns the bytes that a text like 4G, 512M or 1.5T stands for."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 1 <= size <= _MOST:
        raise InputError(f"{option} {text}: not a size; give something like 4G or 800M")
    return int(size)


def machine_ram() -> int:
    """Returns the bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def half_of_machine_ram() -> int:
    """Returns half of this machine's main memory in bytes, which is the default budget."""
    return machine_ram() // 2


def release_freed_memory() -> None:
    """Returns freed memory to the system now, in spite of `keep_freed_memory`: other processes are about to need it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next tensor instead of returning it to the system.

    Otherwise each large tensor is mapped, faulted in page by page and unmapped again, which slows a small model's step.
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        trim_threshold, top_pad, mmap_max = -1, -2, -4
        set_option(mmap_max, 0)
        set_option(trim_threshold, 2**31 - 1)
        set_option(top_pad, 64 << 20)
