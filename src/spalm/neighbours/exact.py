"""Exact search, blockwise: the judge of everything that is faster."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.neighbours.best import NOTHING, Best, Candidates, highest, positive
from spalm.neighbours.workers import Map, chunks

_QUERIES = 1024
"""Queries that share a pass over the keys."""
_KEYS, _AT_ONCE = 2048, 256
"""Keys and queries whose scores one thread holds at a time: few enough to stay in its cache."""
_BLOCKS = 64
"""Blocks of keys that are looked at before the bars are raised: fixed, so that results do not depend on threads."""

_WHOLE = 1024
"""Whole keys that are compared at a time."""
_ROUNDING = 2e-3
"""Relative error allowed for squared lengths in half precision."""

Forbidden = Callable[[Int[np.ndarray, "n"], Int[np.ndarray, "n"]], Bool[np.ndarray, "n"]]
"""(query numbers, rows) -> which of these pairs must not be found; the shapes broadcast."""


class Keys(Protocol):
    def __len__(self) -> int: ...

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]: ...

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]: ...


def nearest(
    queries: Float[np.ndarray, "n width"],
    keys: Keys,
    count: int,
    in_parallel: Map,
    forbidden: Forbidden | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """The rows of the `count` nearest keys of every query and their squared distances, nearest first.

    Where there are fewer, the row is NOTHING and the distance infinite.
    """
    rows = np.full((len(queries), count), NOTHING, np.int64)
    distances = np.full(rows.shape, np.inf, np.float32)
    for first, last in chunks(0, len(queries), _QUERIES):
        part = np.ascontiguousarray(queries[first:last], np.float32)
        mask = None if forbidden is None else lambda query, row, first=first: forbidden(query + first, row)
        best = _best(part, keys, count, in_parallel, mask, progress)
        gaps = ((keys.take(best.rows.clip(0)).astype(np.float32) - part[:, None]) ** 2).sum(2)
        gaps[best.rows == NOTHING] = np.inf
        order = np.argsort(gaps, axis=1, kind="stable")
        rows[first:last] = np.take_along_axis(best.rows, order, 1)
        distances[first:last] = np.take_along_axis(gaps, order, 1)
    return rows, distances


def _best(queries, keys: Keys, count: int, in_parallel: Map, forbidden: Forbidden | None, progress) -> Best:
    best = Best(len(queries), count)
    centre = torch.from_numpy(queries).mean(0)
    asking = torch.from_numpy(queries) - centre

    def look(block: tuple[int, int]) -> Candidates:
        theirs = torch.from_numpy(np.asarray(keys.keys(*block))).float() - centre
        half_norms = theirs.square().sum(1) / -2
        parts = []
        for first, last in chunks(0, len(queries), _AT_ONCE):
            scores = torch.addmm(half_norms, asking[first:last], theirs.T)
            bars = best.bar[first:last]
            if np.isinf(bars).any():
                if forbidden is not None:
                    everyone, everything = np.arange(first, last)[:, None], np.arange(*block)[None]
                    scores[torch.from_numpy(forbidden(everyone, everything))] = -torch.inf
                query, row, score = highest(scores, count)
            else:
                query, row, score = positive(scores.sub_(torch.from_numpy(bars)[:, None]))
                score = score + bars[query]
            parts.append(Candidates(query + first, row + block[0], score))
        found = Candidates.joined(parts)
        return found if forbidden is None else found.where(~forbidden(found.query, found.row))

    blocks = chunks(0, len(keys), _KEYS)
    for first, last in chunks(0, len(blocks), _BLOCKS):
        best.offer(Candidates.joined(in_parallel(look, blocks[first:last])))
        progress((blocks[last - 1][1] - blocks[first][0]) * len(queries))
    return best


class ScannedKeys(Keys, Protocol):
    def scan(self, rows: slice) -> Float[Tensor, "rows reduced"]: ...


def nearest_within(
    queries: Float[np.ndarray, "n width"],
    projected: Float[Tensor, "n reduced"],
    within: Float[np.ndarray, "n"],
    keys: ScannedKeys,
    count: int,
    in_parallel: Map,
    forbidden: Forbidden | None = None,
) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """As `nearest`, given squared distances `within` which neighbours lie, and a projection that shortens distances.

    What is further away than that in the projection need not be looked at whole: exact, at the cost of the projection.
    """
    best = Best(len(queries), count)
    # Projections are kept in half precision: a little further than `within` may be nearer.
    furthest = torch.from_numpy(within * (1 + _ROUNDING)) + _ROUNDING * projected.square().sum(1)
    bars = (projected.square().sum(1) - furthest) / 2

    def look(block: tuple[int, int]) -> Candidates:
        theirs = keys.scan(slice(*block))
        half_norms = theirs.square().sum(1) / -2
        parts = []
        for first, last in chunks(0, len(queries), _AT_ONCE):
            scores = torch.addmm(half_norms, projected[first:last], theirs.T).sub_(bars[first:last, None])
            query, row, _ = positive(scores)
            parts.append((query + first, row + block[0]))
        query, row = map(np.concatenate, zip(*parts))
        if forbidden is not None:
            allowed = ~forbidden(query, row)
            query, row = query[allowed], row[allowed]
        gaps = [
            ((keys.take(row[first:last]).astype(np.float32) - queries[query[first:last]]) ** 2).sum(1)
            for first, last in chunks(0, len(row), _WHOLE)
        ]
        return Candidates(query, row, -np.concatenate([np.zeros(0, np.float32), *gaps]))

    blocks = chunks(0, len(keys), _KEYS)
    for first, last in chunks(0, len(blocks), _BLOCKS):
        best.offer(Candidates.joined(in_parallel(look, blocks[first:last])))
    return best.rows, -best.scores
