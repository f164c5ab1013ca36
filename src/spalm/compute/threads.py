"""Cores that this process may use, and threads that its arithmetic uses."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Barrier
from typing import Any

import faiss
import torch

_FEW_FLOPS = 1e8
"""Number of operations of a forward pass below which one thread is as fast as several."""


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


def threads_for(flops: float) -> AbstractContextManager[None]:
    """Returns a context for a forward pass of about `flops` operations: a small one is done in one thread.

    Waking other threads for each of its hundred small operations takes longer than the operations themselves.
    """
    return using_threads(1) if flops < _FEW_FLOPS and torch.get_num_threads() > 1 else nullcontext()


def map_in_threads(function: Callable[..., Any], *arguments: Iterable, count: int) -> list[Any]:
    """Calls a function with the first, second, ... elements of `arguments`; returns the results in order.

    `count` threads share the calls and divide the threads of arithmetic among them. They meet once, at the end, while
    threads that share every operation meet hundreds of times in a training step, and each time wait for the last one.
    """
    each = max(1, torch.get_num_threads() // count)
    with using_threads(each):
        return list(_pool(count, each).map(function, *arguments))


@cache
def _pool(count: int, each: int) -> ThreadPoolExecutor:
    """Returns a pool of `count` threads, all started, that use `each` threads of arithmetic."""
    pool = ThreadPoolExecutor(count, "lanes", initializer=set_threads, initargs=(each,))
    barrier = Barrier(count)
    for future in [pool.submit(barrier.wait) for _ in range(count)]:
        future.result()
    return pool
