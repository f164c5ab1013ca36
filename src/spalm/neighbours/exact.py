"""Exact search, blockwise: the judge of everything that is faster."""

from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int

from spalm.neighbours.exclusion import Askers
from spalm.neighbours.kernels import MISSING
from spalm.neighbours.topk import Best
from spalm.neighbours.workers import Map, chunks

_QUERIES = 1024
"""Queries that share a pass over the keys."""
_KEYS, _AT_ONCE = 1024, 256
"""Keys and queries whose scores one thread holds at a time: few enough to stay in its cache."""
_TASK = 1 << 17
"""Keys of one thread's task: fixed, so that results do not depend on the number of threads."""


class Keys(Protocol):
    def __len__(self) -> int: ...

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]: ...

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]: ...

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]: ...

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]: ...


def nearest(
    queries: Float[np.ndarray, "n width"], keys: Keys, count: int, in_parallel: Map, askers: Askers | None = None
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """The rows of the `count` nearest keys of every query and their squared distances, nearest first.

    Where there are fewer, the row is MISSING and the distance infinite.
    """
    askers = Askers.strangers(len(queries)) if askers is None else askers
    rows = np.full((len(queries), count), MISSING, np.int64)
    distances = np.full(rows.shape, np.inf, np.float32)
    for first, last in chunks(0, len(queries), _QUERIES):
        part = np.ascontiguousarray(queries[first:last], np.float32)
        best = _best(part, keys, count, in_parallel, askers[first:last])
        gaps = ((keys.take(best.rows.clip(0)).astype(np.float32) - part[:, None]) ** 2).sum(2)
        gaps[best.rows == MISSING] = np.inf
        order = np.argsort(gaps, axis=1, kind="stable")
        rows[first:last] = np.take_along_axis(best.rows, order, 1)
        distances[first:last] = np.take_along_axis(gaps, order, 1)
    return rows, distances


def _best(queries, keys: Keys, count: int, in_parallel: Map, askers: Askers) -> Best:
    # Far from the origin, products of vectors lose digits.
    centre = torch.from_numpy(queries).mean(0)
    asking = torch.from_numpy(queries) - centre
    numbers = np.arange(len(queries), dtype=np.int32)

    def look(task: tuple[int, int]) -> Best:
        best = Best(askers, count)
        for block in chunks(*task, _KEYS):
            theirs = torch.from_numpy(np.asarray(keys.keys(*block))).float() - centre
            half_norms, about = theirs.square().sum(1) / 2, (keys.labels(*block), keys.documents(*block))
            for part in chunks(0, len(queries), _AT_ONCE):
                products = asking[slice(*part)] @ theirs.T
                best.offer(products, half_norms, block[0], *about, numbers[slice(*part)])
        return best

    best = Best(askers, count)
    best.take_in(in_parallel(look, chunks(0, len(keys), _TASK)))
    return best
