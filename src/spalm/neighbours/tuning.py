"""Finding how far the join must look for the recall that is asked for, on a sample of its own queries."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from spalm.neighbours.best import NOTHING, Best
from spalm.neighbours.exact import nearest, nearest_within
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join import BEGINNING, Found, Join, Plan, Queries
from spalm.neighbours.ordered import Ordered
from spalm.neighbours.partitions import NEAR
from spalm.neighbours.workers import Map

SAMPLE = 1024
"""Queries judged by exact search: with K = 4 a recall of 0.95 is known to about half a percent."""
_KEPT = (2, 3, 4, 6, 8, 12, 16)
"""Candidates compared by whole keys, in multiples of K, where the scan has fewer dimensions."""
_SLACK = 1e-4
"""Relative difference below which two distances count as the same: which of several equals is found does not matter."""
_NEAR = (32, 64, 128, NEAR)
_FURTHER = 1.25
"""How much further it reaches if the sample was not found as predicted."""


@dataclass(frozen=True)
class Judge:
    """Some queries whose true neighbours are known."""

    rows: Int[np.ndarray, "sample"]
    """Of the ordered queries, rising."""
    true: Int[np.ndarray, "sample neighbours"]
    """Rows of their true neighbours among the ordered keys; NOTHING where there are fewer."""
    distances: Float[np.ndarray, "sample neighbours"]

    @classmethod
    def of(
        cls, keys: Ordered, queries: Queries, neighbours: int, exclusion: Exclusion, seed: int, in_parallel: Map
    ) -> "Judge":
        rows = _sample(queries, np.random.default_rng(seed))
        own, documents = queries.own(rows), queries.ordered.documents[rows]

        def forbidden(query: np.ndarray, row: np.ndarray) -> np.ndarray:
            return exclusion.forbids(own[query], documents[query], keys.labels[row], keys.documents[row])

        mask = None if queries.first_id is None else forbidden
        vectors = queries.ordered.take(rows).astype(np.float32)
        if not keys.partitions.space.reduced:
            return cls(rows, *nearest(vectors, keys, neighbours, in_parallel, mask))
        # Some entries, any entries, say how far away the neighbours are at most.
        join = Join(keys, queries, Plan(neighbours, neighbours, NEAR, BEGINNING), exclusion)
        within = join.answer(rows, queries.ordered.partition_of(rows)).distances[:, -1]
        scan = queries.ordered.scan(rows)
        return cls(rows, *nearest_within(vectors, scan, within, keys, neighbours, in_parallel, mask))

    def recall(self, found: Found) -> float:
        """Share of the neighbours found that are as near as the true ones; those that do not exist are not counted."""
        exist = self.true != NOTHING
        worst = np.where(exist, self.distances, -1.0).max(1, keepdims=True)
        near_enough = (found.distances <= worst * (1 + _SLACK) + _SLACK) & (found.ids != NOTHING)
        return float((near_enough & exist).sum() / exist.sum()) if exist.any() else 1.0


def _sample(queries: Queries, random: np.random.Generator) -> Int[np.ndarray, "sample"]:
    """Up to SAMPLE rows that are asked for, rising; looked for among many more, not among all of a large memory."""
    count = len(queries.ordered)
    rows = np.arange(count) if count <= 64 * SAMPLE else np.unique(random.integers(0, count, 64 * SAMPLE))
    positions = queries.positions(rows)
    rows = rows[(positions >= 0) & (positions < queries.count)]
    return np.sort(random.choice(rows, min(SAMPLE, len(rows)), replace=False))


def tune(
    keys: Ordered, queries: Queries, neighbours: int, exclusion: Exclusion, judge: Judge, target: float
) -> tuple[Plan, float]:
    """The cheapest plan that finds `target` of the judge's neighbours, and its recall there; else the most thorough.

    Where the true neighbours lie says at once how many partitions must be known to a query and how far it must reach.
    """
    exist = judge.true != NOTHING
    rank, ratio = _where_they_lie(keys, queries, neighbours, exclusion, judge)
    spare = 1 - target
    near = next((near for near in _NEAR if _share(rank[exist], near) >= 1 - spare / 4), _NEAR[-1])
    reduced = keys.partitions.space.reduced
    wanted = target + (spare / 3 if reduced else 0)
    reach = _reach(np.where(rank < near, ratio, 1.0), exist, wanted)

    home = queries.ordered.partition_of(judge.rows)
    plans = [Plan(neighbours, factor * neighbours, near, reach) for factor in (_KEPT if reduced else (1,))]
    while True:
        for plan in plans:
            found = judge.recall(Join(keys, queries, plan, exclusion).answer(judge.rows, home))
            if found >= target:
                return plan, found
        if plan.reach >= 1 and plan.near >= NEAR:
            return plan, found
        plans = [replace(plan, near=NEAR, reach=min(1.0, plan.reach * _FURTHER))]


def _reach(needed: Float[np.ndarray, "sample neighbours"], exist: np.ndarray, wanted: float) -> float:
    """The least reach at which the share of neighbours found is `wanted`, and half a standard error of it more.

    If that is more than can be found at all, it stops a little short of what can: the last few cost the most.
    """
    attainable = ((needed < 1) & exist).sum() / max(1, exist.sum())
    wanted = min(wanted, attainable - (1 - wanted) / 4)
    for reach in np.geomspace(BEGINNING, 1.0, 60):
        found = (needed <= reach) & exist
        shares = found.sum(1) / exist.sum(1).clip(1)
        error = shares.std() / max(1, len(shares)) ** 0.5 if len(shares) else 0.0
        if found.sum() >= min(wanted + error / 2, attainable) * exist.sum():
            break
    return float(reach)


def _where_they_lie(keys: Ordered, queries: Queries, neighbours: int, exclusion: Exclusion, judge: Judge):
    """For each true neighbour: the rank of its partition among those near its query's own (-1 for that one itself, NEAR
    where it is not among them), and the reach at which the query looks there."""
    join = Join(keys, queries, Plan(neighbours, neighbours, NEAR, 1.0), exclusion)
    home = queries.ordered.partition_of(judge.rows)
    vectors = queries.ordered.scan(judge.rows)
    best = Best(len(home), neighbours)
    seen = join.begin(judge.rows, home, vectors, best).numpy()
    radius = join.radius(vectors, best).numpy().clip(1e-9)
    places = keys.partition_of(judge.true.clip(0))
    rank, ratio = np.full(places.shape, NEAR), np.ones(places.shape)
    for query, partition in enumerate(home):
        margins = join.margins(vectors[query : query + 1], partition)[0].numpy()
        for neighbour, place in enumerate(places[query]):
            known = np.flatnonzero(join.near[partition] == place)
            if place == partition:
                rank[query, neighbour], ratio[query, neighbour] = -1, 0.0
            elif len(known):
                rank[query, neighbour] = known[0]
                margin = margins[known[0]]
                ratio[query, neighbour] = 0.0 if margin <= seen[query] else margin / radius[query]
    return rank, ratio


def _share(rank: np.ndarray, near: int) -> float:
    return float((rank < near).mean()) if rank.size else 1.0
