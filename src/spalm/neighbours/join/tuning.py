"""Finding how far the join must look for the recall that is asked for, on a sample of its own queries."""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join.ground_truth import nearest_within
from spalm.neighbours.join.join import BEGINNING, Found, Join, Plan, Queries
from spalm.neighbours.join.layout import Ordered
from spalm.neighbours.kernels import MISSING
from spalm.neighbours.partitions import NEAR
from spalm.neighbours.workers import Map

SAMPLE = 2048
"""Queries judged by exact search: with K = 4 a recall of 0.95 is known to about a third of a percent."""
_KEPT = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""Candidates compared by whole keys, in multiples of K, where the scan has fewer dimensions."""
_SLACK = 1e-4
"""Relative difference below which two distances count as the same: which of several equals is found does not matter."""
_NEAR = (32, 64, 128, NEAR)
_FURTHER = 1.1
"""How much further it reaches if the sample was not found as predicted."""
_FETCHING = 16
"""What a dimension of a candidate's whole key costs, in dimensions of a scanned key: it is fetched from anywhere."""


@dataclass(frozen=True)
class Judge:
    """Some queries whose true neighbours are known."""

    rows: Int[np.ndarray, "sample"]
    """Of the ordered queries, rising."""
    true: Int[np.ndarray, "sample neighbours"]
    """Rows of their true neighbours among the ordered keys; MISSING where there are fewer."""
    distances: Float[np.ndarray, "sample neighbours"]

    scan_ranks: Int[np.ndarray, "sample neighbours"]
    """How many keys are nearer than the true neighbour by the scan's distance."""

    @classmethod
    def of(
        cls, keys: Ordered, queries: Queries, neighbours: int, exclusion: Exclusion, seed: int, in_parallel: Map
    ) -> "Judge":
        rows = _sample(queries, np.random.default_rng(seed))
        # Some entries, any entries, say how far away the neighbours are at most.
        join = Join(keys, queries, Plan(neighbours, neighbours, NEAR, BEGINNING), exclusion)
        return cls(rows, *nearest_within(join, rows, join.answer(rows).distances[:, -1], in_parallel))

    def recall(self, found: Found) -> float:
        """Share of the neighbours found that are as near as the true ones; those that do not exist are not counted."""
        exist = self.true != MISSING
        worst = np.where(exist, self.distances, -1.0).max(1, keepdims=True)
        near_enough = (found.distances <= worst * (1 + _SLACK) + _SLACK) & (found.ids != MISSING)
        return float((near_enough & exist).sum() / exist.sum()) if exist.any() else 1.0


def _sample(queries: Queries, random: np.random.Generator) -> Int[np.ndarray, "sample"]:
    """Up to SAMPLE rows that are asked for, rising; looked for among many more, not among all of a large memory."""
    count = len(queries.ordered)
    rows = np.arange(count) if count <= 64 * SAMPLE else np.unique(random.integers(0, count, 64 * SAMPLE))
    positions = queries.positions(rows)
    rows = rows[(positions >= 0) & (positions < queries.count)]
    return np.sort(random.choice(rows, min(SAMPLE, len(rows)), replace=False))


@dataclass(frozen=True)
class Tuned:
    plan: Plan
    recall: float
    """Of the judge's neighbours."""
    visits: float
    """Partitions that a query looks into besides its own, on average."""


def tune(keys: Ordered, queries: Queries, neighbours: int, exclusion: Exclusion, judge: Judge, target: float) -> Tuned:
    """The cheapest plan that finds `target` of the judge's neighbours; if there is none, the most thorough.

    Where the true neighbours lie says how many partitions must be known to a query, how far it must reach, and how many
    candidates must be compared whole.
    """
    exist = judge.true != MISSING
    places = _Places.of(keys, queries, neighbours, exclusion, judge)
    near = next((near for near in _NEAR if _share(places.rank[exist], near) >= 1 - (1 - target) / 4), NEAR)
    plans, costs = [], []
    for factor in _KEPT if keys.partitions.space.reduced else (1,):
        kept = math.ceil(factor * neighbours)
        findable = exist & (places.rank < near) & (judge.scan_ranks < kept)
        reach = _reach(np.where(findable, places.ratio, np.inf), exist, target)
        plans.append(Plan(neighbours, kept, near, reach))
        scanned = len(keys) / len(keys.partitions) * (1 + places.visits(near, reach)) * keys.partitions.space.width
        out_of_reach = findable.sum() < target * exist.sum()
        costs.append((out_of_reach, scanned + _FETCHING * kept * keys.width * keys.partitions.space.reduced))
    plan = plans[costs.index(min(costs))]
    while True:
        found = judge.recall(Join(keys, queries, plan, exclusion).answer(judge.rows))
        if found >= target or (plan.reach >= 1 and plan.near >= NEAR):
            return Tuned(plan, found, places.visits(plan.near, plan.reach))
        plan = replace(plan, near=NEAR, kept=max(each.kept for each in plans), reach=min(1.0, plan.reach * _FURTHER))


def _reach(needed: Float[np.ndarray, "sample neighbours"], exist: np.ndarray, wanted: float) -> float:
    """The least reach at which the share of neighbours found is `wanted`, and a standard error of it more.

    If that is more than can be found at all, it stops a little short of what can: the last few cost the most.
    """
    attainable = ((needed < 1) & exist).sum() / max(1, exist.sum())
    wanted = min(wanted, attainable - (1 - wanted) / 4)
    for reach in np.geomspace(BEGINNING, 1.0, 60):
        found = (needed <= reach) & exist
        shares = found.sum(1) / exist.sum(1).clip(1)
        error = shares.std() / max(1, len(shares)) ** 0.5 if len(shares) else 0.0
        if found.sum() >= min(wanted + error, attainable) * exist.sum():
            break
    return float(reach)


@dataclass(frozen=True)
class _Places:
    """Where the true neighbours of the judged queries lie."""

    rank: Int[np.ndarray, "sample neighbours"]
    """Of a neighbour's partition among those near its query's own: -1 for that one, NEAR where it is not among them."""
    ratio: Float[np.ndarray, "sample neighbours"]
    """The reach at which the query looks there."""
    borders: Float[np.ndarray, "sample near"]
    """The reach at which the query looks into each of the partitions near its own."""

    @classmethod
    def of(cls, keys: Ordered, queries: Queries, neighbours: int, exclusion: Exclusion, judge: Judge) -> "_Places":
        join = Join(keys, queries, Plan(neighbours, neighbours, NEAR, 1.0), exclusion)
        home = queries.ordered.partition_of(judge.rows)
        vectors, best = queries.ordered.scan(judge.rows), join.empty(judge.rows)
        waiting = join.begin(judge.rows, vectors, best)
        not_seen = set(zip(waiting.query.tolist(), waiting.partition.tolist()))
        radius = join.radius(judge.rows, best).numpy().clip(1e-9)
        places = keys.partition_of(judge.true.clip(0))
        rank, ratio = np.full(places.shape, NEAR), np.ones(places.shape)
        borders = np.ones((len(home), join.near.shape[1]))
        for query, partition in enumerate(home):
            borders[query] = join.margins(vectors[query : query + 1], partition)[0].numpy() / radius[query]
            for neighbour, place in enumerate(places[query]):
                known = np.flatnonzero(join.near[partition] == place)
                if place == partition:
                    rank[query, neighbour], ratio[query, neighbour] = -1, 0.0
                elif len(known):
                    rank[query, neighbour] = known[0]
                    ratio[query, neighbour] = borders[query, known[0]] if (query, int(place)) in not_seen else 0.0
        return cls(rank, ratio, borders)

    def visits(self, near: int, reach: float) -> float:
        """Partitions that a query looks into besides its own, on average."""
        return float((self.borders[:, :near] <= reach).sum(1).mean()) if len(self.borders) else 0.0


def _share(rank: np.ndarray, near: int) -> float:
    return float((rank < near).mean()) if rank.size else 1.0
