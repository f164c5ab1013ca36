"""Exact neighbours of a few queries of a join, without comparing every key: keys that cannot be near are skipped."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from spalm.memory import MISSING
from spalm.neighbours.exact import exact_search
from spalm.neighbours.join.join import Join
from spalm.neighbours.kernels import scores_above
from spalm.neighbours.parallel import ParallelMap, chunks

_ROUNDING = 2e-3
"""Relative error allowed for squared lengths in half precision."""
_PARTITIONS = 64
"""Partitions of one thread's task."""
_WHOLE = 1024
"""Whole keys that are compared at a time."""
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
    """
    count = join.plan.neighbours
    queries, exclusion = join.queries.vectors, join.queries.exclusion(rows, join.exclusion)
    true, distances = np.full((len(rows), count), MISSING, np.int64), np.full((len(rows), count), np.inf, np.float32)
    scan_ranks = np.zeros((len(rows), count), np.int64)
    whole = queries.take(rows).astype(np.float32)
    known = np.flatnonzero(np.isfinite(within))
    if len(known) < len(rows):
        unknown = np.flatnonzero(np.isinf(within))
        true[unknown], distances[unknown] = exact_search(
            whole[unknown], join.keys, count, parallel=parallel, exclusion=exclusion[unknown]
        )

    scan, own = queries.scan(rows), queries.partition_of(rows)
    own_centres = join.centres[own]
    squares = scan.square().sum(1)
    # In half precision, a key that seems a little further than `within` may in truth be nearer.
    furthest = torch.from_numpy(within * (1 + _ROUNDING)) + _ROUNDING * squares
    thresholds = ((squares - furthest) / 2).numpy()
    to_own = (scan - own_centres).square().sum(1)

    def may_find(first: int, last: int) -> Bool[np.ndarray, "n partitions"]:
        """Returns whether each query's borders to partitions [first, last) lie near enough."""
        centres = join.centres[first:last]
        # Not from products of vectors, which give centres that nearly coincide a distance of zero.
        to_others, apart = (torch.cdist(points, centres, compute_mode=_DIRECT) for points in (scan, own_centres))
        too_far = to_others.square() - to_own[:, None] > 2 * apart * furthest.sqrt()[:, None]
        return ~too_far.numpy() | (own[:, None] == np.arange(first, last))

    def search(task: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns query, row, squared distance and score of the keys in a task's partitions that pass both bounds."""
        near_enough = may_find(*task)[known]
        parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))]
        for partition in range(*task):
            place = slice(*join.keys.starts[partition : partition + 2].tolist())
            near_by = known[near_enough[:, partition - task[0]]]
            products = scan[near_by] @ join.keys.scan(place).T
            half_norms = join.keys.half_norms[place].numpy()
            query, row = scores_above(products.numpy(), half_norms, thresholds[near_by])
            parts.append((near_by[query], row + place.start, products.numpy()[query, row] - half_norms[row]))
        query, row, score = map(np.concatenate, zip(*parts))
        allowed = ~exclusion.forbids(query, join.keys.label_of[row], join.keys.document_of[row])
        query, row, score = query[allowed], row[allowed], score[allowed]
        gaps = [
            join.keys.squared_distances(whole[query[first:last]], row[first:last, None])[:, 0]
            for first, last in chunks(0, len(row), _WHOLE)
        ]
        return query, row, np.concatenate([np.zeros(0, np.float32), *gaps]), score

    found = parallel(search, chunks(0, len(join.centres), _PARTITIONS))
    query, row, gap, score = map(np.concatenate, zip(*found))
    scan_rank = _ranks(query, -score, row)
    rank = _ranks(query, gap, row)
    kept = rank < count
    where = query[kept], rank[kept]
    true[where], distances[where], scan_ranks[where] = row[kept], gap[kept], scan_rank[kept]
    return true, distances, scan_ranks


def _ranks(query: Int[np.ndarray, "n"], by: Float[np.ndarray, "n"], row: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Returns the rank of each key among those of the same query, in rising order of `by`."""
    order = np.lexsort((row, by, query))
    ranks = np.empty(len(query), np.int64)
    ranks[order] = np.arange(len(query)) - np.searchsorted(query[order], query[order])
    return ranks
