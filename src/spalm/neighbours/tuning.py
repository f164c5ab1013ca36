"""Finding how far the join must look for the recall that is asked for, on a sample of its own queries."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from spalm.neighbours.best import NOTHING, Best
from spalm.neighbours.exact import nearest
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join import Found, Join, Plan, Queries
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
_LEAST = 0.02
"""Reach below which nothing is saved any more."""


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
        asked = np.flatnonzero(queries.asked())
        rows = np.sort(np.random.default_rng(seed).choice(asked, min(SAMPLE, len(asked)), replace=False))
        own, documents = queries.own(rows), queries.ordered.documents[rows]

        def forbidden(query: np.ndarray, row: np.ndarray) -> np.ndarray:
            return exclusion.forbids(own[query], documents[query], keys.labels[row], keys.documents[row])

        mask = None if queries.first_id is None else forbidden
        vectors = queries.ordered.take(rows).astype(np.float32)
        return cls(rows, *nearest(vectors, keys, neighbours, in_parallel, mask))

    def recall(self, found: Found) -> float:
        """Share of the neighbours found that are as near as the true ones; those that do not exist are not counted."""
        exist = self.true != NOTHING
        worst = np.where(exist, self.distances, -1.0).max(1, keepdims=True)
        near_enough = (found.distances <= worst * (1 + _SLACK) + _SLACK) & (found.ids != NOTHING)
        return float((near_enough & exist).sum() / max(1, exist.sum()))


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

    def recall(kept: int) -> float:
        join = Join(keys, queries, Plan(neighbours, kept, near, reach), exclusion)
        return judge.recall(join.answer(judge.rows, queries.ordered.partition_of(judge.rows)))

    for kept in [factor * neighbours for factor in (_KEPT if reduced else (1,))]:
        found = recall(kept)
        if found >= target:
            break
    return Plan(neighbours, kept, near, reach), found


def _reach(needed: Float[np.ndarray, "sample neighbours"], exist: np.ndarray, wanted: float) -> float:
    """The least reach at which the share of neighbours found is `wanted`, and half a standard error of it more."""
    for reach in np.geomspace(_LEAST, 1.0, 60):
        found = (needed <= reach) & exist
        shares = found.sum(1) / exist.sum(1).clip(1)
        error = shares.std() / len(shares) ** 0.5
        if found.sum() >= (wanted + error / 2) * exist.sum():
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
