"""Threads that share the work of a machine, each doing its own arithmetic on one core.

Many small products run faster side by side than one after another with all cores on each, and a product computed by
one core has the same bytes however many others are at work.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from spalm.compute import set_threads

Map = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]
"""Applies a function to every task and returns the results in the tasks' order."""


@contextmanager
def workers(threads: int | None = None) -> Iterator[Map]:
    """A `Map` over `threads` threads (default: as many as torch uses), which waits for all of them."""
    count = torch.get_num_threads()
    with ThreadPoolExecutor(threads or count, initializer=set_threads, initargs=(1,)) as pool:
        try:
            yield lambda function, tasks: list(pool.map(function, tasks))
        finally:
            torch.set_num_threads(count)


def in_turn(function: Callable[[Any], Any], tasks: Iterable[Any]) -> list[Any]:
    """A `Map` without threads of its own."""
    return list(map(function, tasks))


def chunks(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """[first, last) in pieces of at most `size`."""
    return [(begin, min(begin + size, last)) for begin in range(first, last, size)]
