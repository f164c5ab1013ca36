"""Threads that share work on one machine, each doing its arithmetic on one core.

Many small products run faster side by side than one after another with all cores on each, and a product computed by
one core has the same bytes however many others are at work.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from spalm.compute import LOCAL, Engine, set_threads

ParallelMap = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]
"""Applies a function to every task and returns the results in the order of the tasks."""


@contextmanager
def thread_map(threads: int | None = None) -> Iterator[ParallelMap]:
    """Yields a `ParallelMap` over a pool of `threads` threads (default: as many as torch uses)."""
    count = torch.get_num_threads()
    with ThreadPoolExecutor(threads or count, initializer=set_threads, initargs=(1,)) as pool:
        try:
            yield lambda function, tasks: list(pool.map(function, tasks))
        finally:
            torch.set_num_threads(count)


def serial_map(function: Callable[[Any], Any], tasks: Iterable[Any]) -> list[Any]:
    """Applies a function to one task after another: a `ParallelMap` without threads."""
    return list(map(function, tasks))


@dataclass(frozen=True)
class Workers:
    """The threads of this process and the workers of an engine, among which a large piece of work is divided."""

    parallel: ParallelMap = serial_map
    """Map over the threads of this process."""
    engine: Engine = LOCAL
    """Engine that does the parts of a job."""
    per_machine: int = 1
    """Parts of a job that run on one machine at a time."""


def chunks(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Returns the range [first, last) as consecutive ranges of at most `size`."""
    return [(begin, min(begin + size, last)) for begin in range(first, last, size)]
