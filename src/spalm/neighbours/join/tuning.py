"""Tuning of the join: how far it must search for the recall that is asked for, measured on a sample of its queries."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from spalm.memory import MISSING
from spalm.neighbours.join.ground_truth import exact_neighbours
from spalm.neighbours.join.join import FIRST_REACH, Join, JoinPlan, JoinQueries, JoinTask
from spalm.neighbours.parallel import ParallelMap
from spalm.neighbours.partitions import NEAR
from spalm.neighbours.recall import Tolerance, recall_at_k

TUNED_ON, JUDGED_ON = 2048, 1024
"""Numbers of queries by which the join is tuned, and of others by which it is judged afterwards."""
SAMPLE = TUNED_ON + JUDGED_ON
"""Number of queries that are searched exactly."""
_KEPT = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""Candidates compared by whole keys, in multiples of K."""
_NEAR = (32, 64, 128, NEAR)
"""Numbers of near partitions that are tried."""
_FURTHER = 1.1
"""Factor by which the reach grows if the recall on the sample is lower than predicted."""
_FETCHING = 64
"""Cost of a dimension of a whole key, in dimensions of a scanned key: whole keys are fetched from all over the file."""


@dataclass(frozen=True)
class RecallSample:
    """A sample of a join's queries whose true neighbours are known, by which recall is measured."""

    rows: Int[np.ndarray, "sample"]
    """Rows of the sampled queries, rising."""
    true: Int[np.ndarray, "sample neighbours"]
    """Rows of their true neighbours among the keys; MISSING where there are fewer."""
    distances: Float[np.ndarray, "sample neighbours"]
    """Squared distances of the true neighbours."""
    scan_ranks: Int[np.ndarray, "sample neighbours"]
    """Number of keys that are nearer than the true neighbour in the scan space."""
    tolerance: Tolerance
    """Differences of squared distances that do not count."""

    @classmethod
    def of(cls, task: JoinTask, seed: int, parallel: ParallelMap) -> "RecallSample":
        """Draws a sample and finds its true neighbours."""
        rows = _draw(task.queries, np.random.default_rng(seed))
        # The K nearest are no further away than any other K entries.
        join = Join(task, JoinPlan(task.neighbours, task.neighbours, NEAR, FIRST_REACH))
        within = join.neighbours_of(rows).distances[:, -1]
        return cls(rows, *exact_neighbours(join, rows, within, parallel=parallel), task.tolerance)

    def split(self) -> tuple["RecallSample", "RecallSample"]:
        """Returns the queries by which the join is tuned, and those by which it is judged: a third, and at least one.

        A single query has to do for both.
        """
        judged = np.arange(len(self.rows)) % (SAMPLE // JUDGED_ON) == 0
        return (self[~judged], self[judged]) if len(self.rows) > 1 else (self, self)

    def __getitem__(self, which: Bool[np.ndarray, "sample"]) -> "RecallSample":
        return RecallSample(
            self.rows[which], self.true[which], self.distances[which], self.scan_ranks[which], self.tolerance
        )

    def recall(self, distances: Float[np.ndarray, "sample neighbours"]) -> float:
        """Returns the recall of neighbours at these squared distances; 1 if there is nothing to find."""
        found = recall_at_k(distances, self.distances, self.tolerance.absolute, relative=self.tolerance.relative)
        return 1.0 if found is None else found


def _draw(queries: JoinQueries, random: np.random.Generator) -> Int[np.ndarray, "sample"]:
    """Returns up to SAMPLE rows of queries, rising; of a large memory, not all rows are considered."""
    count = len(queries.vectors)
    rows = np.arange(count) if count <= 64 * SAMPLE else np.unique(random.integers(0, count, 64 * SAMPLE))
    positions = queries.positions(rows)
    rows = rows[(positions >= 0) & (positions < queries.count)]
    return np.sort(random.choice(rows, min(SAMPLE, len(rows)), replace=False))


@dataclass(frozen=True)
class TunedPlan:
    """A plan and what it achieves on the sample."""

    plan: JoinPlan
    """Plan by which the join is to search."""
    recall: float
    """Recall on the sample."""
    visits: float
    """Number of partitions that a query visits besides its own, on average."""


def tune_join(task: JoinTask, sample: RecallSample, target: float) -> TunedPlan:
    """Returns the cheapest plan that finds `target` of the sample's neighbours; if there is none, the most thorough.

    The places of the true neighbours show how many near partitions a query must consider, how far it must reach, and
    how many candidates must be compared whole.
    """
    keys, exist = task.keys, sample.true != MISSING
    places = _Places.of(task, sample)
    near = next((near for near in _NEAR if _share(places.rank[exist], near) >= 1 - (1 - target) / 4), NEAR)
    plans, costs = [], []
    for factor in _KEPT:
        kept = math.ceil(factor * task.neighbours)
        findable = exist & (places.rank < near) & (sample.scan_ranks < kept)
        reach = _reach(np.where(findable, places.ratio, np.inf), exist, target)
        plans.append(JoinPlan(task.neighbours, kept, near, reach))
        scanned = len(keys) / len(keys.partitions) * (1 + places.visits(near, reach)) * keys.partitions.space.width
        out_of_reach = findable.sum() < target * exist.sum()
        costs.append((out_of_reach, scanned + _FETCHING * kept * keys.width))
    plan = plans[costs.index(min(costs))]
    most = plans[-1].kept
    while True:
        found = sample.recall(Join(task, plan).neighbours_of(sample.rows).distances)
        if found >= target or (plan.reach >= 1 and plan.near >= NEAR and plan.kept >= most):
            return TunedPlan(plan, found, places.visits(plan.near, plan.reach))
        kept = next((each.kept for each in plans if each.kept > plan.kept), most)  # not all at once: each costs time
        plan = replace(plan, near=NEAR, kept=kept, reach=min(1.0, plan.reach * _FURTHER))


def _reach(
    needed: Float[np.ndarray, "sample neighbours"], exist: Bool[np.ndarray, "sample neighbours"], wanted: float
) -> float:
    """Returns the least reach at which the share of neighbours found is `wanted` plus one standard error.

    If fewer can be found at all, the aim is a little less than what can: the last few cost the most.
    """
    reach = 1.0
    attainable = ((needed < 1) & exist).sum() / max(1, exist.sum())
    wanted = min(wanted, attainable - (1 - wanted) / 4)
    for reach in np.geomspace(FIRST_REACH, 1.0, 60):
        found = (needed <= reach) & exist
        shares = found.sum(1) / exist.sum(1).clip(1)
        error = shares.std() / max(1, len(shares)) ** 0.5 if len(shares) else 0.0
        if found.sum() >= min(wanted + error, attainable) * exist.sum():
            break
    return float(reach)


@dataclass(frozen=True)
class _Places:
    """Places of the sampled queries' true neighbours: their partitions, and the reach at which these are visited."""

    rank: Int[np.ndarray, "sample neighbours"]
    """Rank of a neighbour's partition among those near the query's own: -1 for its own, NEAR if it is none of them."""
    ratio: Float[np.ndarray, "sample neighbours"]
    """Reach at which the query visits that partition."""
    borders: Float[np.ndarray, "sample near"]
    """Reach at which the query visits each of the partitions near its own."""

    @classmethod
    def of(cls, task: JoinTask, sample: RecallSample) -> "_Places":
        """Measures the places after a first round of the join."""
        join, queries = Join(task, JoinPlan(task.neighbours, task.neighbours, NEAR, 1.0)), task.queries.vectors
        own = queries.partition_of(sample.rows)
        vectors, best = queries.scan(sample.rows), join.new_topk(sample.rows)
        waiting = join.first_round(sample.rows, vectors, best)
        radius = join.radius(best).numpy().clip(1e-9)
        places = task.keys.partition_of(sample.true.clip(0))
        borders = np.ones((len(own), join.near.shape[1]))
        for partition in np.unique(own):
            queries_there = np.flatnonzero(own == partition)
            margins = join.margins(vectors[torch.from_numpy(queries_there)], int(partition)).numpy()
            borders[queries_there] = margins / radius[queries_there, None]
        rank, ratio = np.full(places.shape, NEAR), np.ones(places.shape)
        waits = waiting.query.astype(np.int64) * len(join.centres) + waiting.partition
        for neighbour, place in enumerate(places.T):
            here = join.near[own] == place[:, None]
            query, at = np.nonzero(here)
            waiting_there = np.isin(query * len(join.centres) + place[query], waits)
            rank[query, neighbour] = at
            ratio[query, neighbour] = np.where(waiting_there, borders[query, at], 0.0)
            rank[place == own, neighbour], ratio[place == own, neighbour] = -1, 0.0
        return cls(rank, ratio, borders)

    def visits(self, near: int, reach: float) -> float:
        """Returns the number of partitions that a query visits besides its own, on average."""
        return float((self.borders[:, :near] <= reach).sum(1).mean()) if len(self.borders) else 0.0


def _share(rank: np.ndarray, near: int) -> float:
    """Returns the share of the ranks that are below `near`."""
    return float((rank < near).mean()) if rank.size else 1.0
