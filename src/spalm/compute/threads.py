"""Cores that this process may use, and threads that its arithmetic uses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import faiss
import torch


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(count: int) -> None:
    """Makes torch and faiss use `count` threads when they are called from this thread."""
    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Sets the threads of torch and faiss for the duration of a block."""
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    set_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        faiss.omp_set_num_threads(before[1])
