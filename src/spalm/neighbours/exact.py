"""Exact nearest-neighbour search, block by block: the reference by which every faster search is judged."""

import numpy as np
import torch
from jaxtyping import Float, Int

from spalm.memory import MISSING
from spalm.neighbours.exclusion import QueryExclusion
from spalm.neighbours.parallel import ParallelMap, chunks
from spalm.neighbours.topk import TopK
from spalm.neighbours.vectors import Vectors

_QUERIES = 1024
"""Queries that share a pass over the keys."""
_KEYS, _QUERIES_AT_ONCE = 1024, 256
"""Keys and queries whose scores one thread holds at a time: few enough to stay in its cache."""
_GATHERED = 16 << 20
"""Bytes of candidates that are compared whole at a time."""
_TASK = 1 << 17
"""Keys of one thread's task: fixed, so that results do not depend on the number of threads."""


def exact_search(
    queries: Float[np.ndarray, "n width"],
    keys: Vectors,
    count: int,
    *,
    parallel: ParallelMap,
    exclusion: QueryExclusion | None = None,
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """Returns the rows of the `count` nearest keys of every query and their squared distances, nearest first.

    Where there are fewer, the row is MISSING and the distance infinite.
    """
    exclusion = QueryExclusion.nothing(len(queries)) if exclusion is None else exclusion
    rows = np.full((len(queries), count), MISSING, np.int64)
    distances = np.full(rows.shape, np.inf, np.float32)
    for first, last in chunks(0, len(queries), _QUERIES):
        part = np.ascontiguousarray(queries[first:last], np.float32)
        best = _topk(part, keys, count, parallel=parallel, exclusion=exclusion[first:last])
        gaps = np.empty(best.rows.shape, np.float32)
        for begin, end in chunks(0, len(part), max(1, _GATHERED // (4 * count * keys.width))):
            candidates = keys.take(best.rows[begin:end].clip(0)).astype(np.float32)
            gaps[begin:end] = ((candidates - part[begin:end, None]) ** 2).sum(2)
        gaps[best.rows == MISSING] = np.inf
        order = np.argsort(gaps, axis=1, kind="stable")
        rows[first:last] = np.take_along_axis(best.rows, order, 1)
        distances[first:last] = np.take_along_axis(gaps, order, 1)
    return rows, distances


def _topk(queries, keys: Vectors, count: int, *, parallel: ParallelMap, exclusion: QueryExclusion) -> TopK:
    """Returns the `count` best rows of every query, found by scoring all keys."""
    # Far from the origin, products of vectors lose digits.
    centre = torch.from_numpy(queries).mean(0)
    centred = torch.from_numpy(queries) - centre
    numbers = np.arange(len(queries), dtype=np.int32)

    def scan(task: tuple[int, int]) -> TopK:
        """Scores the keys of one task."""
        best = TopK(exclusion, count)
        for block in chunks(*task, _KEYS):
            block_keys = torch.from_numpy(np.asarray(keys.keys(*block))).float() - centre
            half_norms = block_keys.square().sum(1) / 2
            labels, documents = keys.labels(*block), keys.documents(*block)
            for part in chunks(0, len(queries), _QUERIES_AT_ONCE):
                products = centred[slice(*part)] @ block_keys.T
                best.push(
                    numbers[slice(*part)],
                    products,
                    block[0],
                    half_norms=half_norms,
                    labels=labels,
                    documents=documents,
                )
        return best

    best = TopK(exclusion, count)
    best.merge(parallel(scan, chunks(0, len(keys), _TASK)))
    return best
