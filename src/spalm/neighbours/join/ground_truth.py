"""Exact neighbours of a few queries of a join, without comparing every key: keys that cannot be near are skipped."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.memory import MISSING
from spalm.neighbours.exact import exact_search
from spalm.neighbours.join.join import Join, Visits
from spalm.neighbours.kernels import counting_sort_order
from spalm.neighbours.parallel import ParallelMap, chunks
from spalm.neighbours.topk import TopK

_ROUNDING = 2.0**-8
"""Error allowed for a distance, as a share of the lengths that are rounded to bfloat16."""
_QUERIES = 512
"""Most queries of one thread's task."""
_VISITS = 1 << 21
"""Most visits of one thread's task: of hard vectors, every query crosses every border."""
_PARTITIONS = 1024
"""Partitions whose borders are looked at together."""
_ROOMS = (4, 16)
"""Numbers of candidates for each neighbour for which there is room, at first and for queries that have more. A query
that has still more, as an outlier may, is compared with every key: candidates are kept in order, so a long list takes
much longer."""
_DIRECT = "donot_use_mm_for_euclid_dist"
"""Mode in which torch.cdist computes distances from differences instead of products."""


def exact_neighbours(
    join: Join, rows: Int[np.ndarray, "n"], within: Float[np.ndarray, "n"], *, parallel: ParallelMap
) -> tuple[Int[np.ndarray, "n neighbours"], Float[np.ndarray, "n neighbours"], Int[np.ndarray, "n neighbours"]]:
    """Returns the nearest keys of the queries in `rows`: rows, squared distances, and ranks in the scan space.

    K keys of each query are known to lie `within` these squared distances. The keys come nearest first; the rank is the
    number of keys that are nearer in the scan space.

    Two bounds are used: nothing behind a border is nearer than the border, and no key is nearer than it is in the scan
    space, which has only some of the keys' axes. Keys that pass both are compared whole. The result is exact, except
    for the few keys that are not in the partition nearest to them, because only those of BEAM groups were compared.
    Queries with too many such keys are compared with all keys; their ranks are those of the whole keys.
    """
    count = join.plan.neighbours
    true, distances = np.full((len(rows), count), MISSING, np.int64), np.full((len(rows), count), np.inf, np.float32)
    scan_ranks = np.broadcast_to(np.arange(count), (len(rows), count)).copy()  # where they are not counted
    bounded = np.flatnonzero(np.isfinite(within))
    together = max(16, min(_QUERIES, _VISITS // len(join.centres)))

    def search(task: tuple[int, int]) -> Int[np.ndarray, "left"]:
        """Finds the neighbours of some of the queries; returns those that have too many candidates."""
        some = bounded[slice(*task)]
        vectors = join.queries.vectors.scan(rows[some])
        visits, furthest = _borders_crossed(join, vectors, rows[some], within=torch.from_numpy(within[some]))
        left = np.arange(len(some))
        for room in _ROOMS:
            best = TopK(join.queries.exclusion(rows[some[left]], join.exclusion), room * count)
            best.scores[:] = furthest[left, None]
            join.visit(vectors[left], best, _of_queries(visits, left))
            fits = best.rows[:, -1] == MISSING
            where, candidates = some[left[fits]], best.rows[fits]
            whole = join.queries.vectors.take(rows[where]).astype(np.float32)
            gaps = join.keys.squared_distances(whole, candidates)
            order = np.argsort(gaps, axis=1, kind="stable")[:, :count]
            true[where] = np.take_along_axis(candidates, order, 1)
            distances[where] = np.take_along_axis(gaps, order, 1)
            scan_ranks[where] = order
            left = left[~fits]
        return some[left]

    others = [np.flatnonzero(np.isinf(within)), *parallel(search, chunks(0, len(bounded), together))]
    compared = np.concatenate(others)
    true[compared], distances[compared] = exact_search(
        join.queries.vectors.take(rows[compared]).astype(np.float32),
        join.keys,
        count,
        parallel=parallel,
        exclusion=join.queries.exclusion(rows[compared], join.exclusion),
    )
    return true, distances, scan_ranks


def _borders_crossed(
    join: Join, vectors: Float[Tensor, "n width"], rows: Int[np.ndarray, "n"], *, within: Float[Tensor, "n"]
) -> tuple[Visits, Float[np.ndarray, "n"]]:
    """Returns the partitions that may hold a key within these squared distances, and the lowest score of such keys."""
    own = join.queries.vectors.partition_of(rows)
    own_centres = join.centres[own]
    to_own = (vectors - own_centres).square().sum(1)
    # Rounded, a key that seems a little further than `within` may in truth be nearer.
    furthest = (1 + _ROUNDING) * within.sqrt() + _ROUNDING * to_own.sqrt()
    longest = to_own.sqrt()
    parts = []
    for first, last in chunks(0, len(join.centres), _PARTITIONS):
        centres = join.centres[first:last]
        # Not from products of vectors, which give centres that nearly coincide a distance of zero.
        to_others, apart = (torch.cdist(points, centres, compute_mode=_DIRECT) for points in (vectors, own_centres))
        too_far = to_others.square() - to_own[:, None] > 2 * apart * furthest[:, None]
        crossed = ~too_far | (torch.from_numpy(own)[:, None] == torch.arange(first, last))
        longest = torch.maximum(longest, torch.where(crossed, to_others, 0).amax(1))
        query, partition = crossed.nonzero(as_tuple=True)
        parts.append((query.numpy().astype(np.int32), (partition + first).numpy().astype(np.int32)))
    query, partition = map(np.concatenate, zip(*parts))
    order = counting_sort_order(partition, len(join.centres))
    visits = Visits(query[order], partition[order], np.zeros(len(order), np.float32))
    score = -(furthest + _ROUNDING * longest).square() / 2
    return visits, np.nextafter(score.numpy(), np.float32(-np.inf))


def _of_queries(visits: Visits, queries: Int[np.ndarray, "some"]) -> Visits:
    """Returns the visits of some queries, which are numbered anew."""
    number = np.full(visits.query.max(initial=-1) + 1, -1, np.int32)
    number[queries] = np.arange(len(queries))
    found = visits[number[visits.query] >= 0]
    return Visits(number[found.query], found.partition, found.margin)
