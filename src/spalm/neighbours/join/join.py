"""The join itself: the neighbours of many queries at once, partition by partition.

A query first looks for neighbours in its own partition. The K-th of them lies at a distance r, and the border to
partition g at a distance m, the margin:

    m = (|q - c_g|^2 - |q - c_own|^2) / (2 |c_g - c_own|)

Nothing beyond a border with m >= r can be nearer. In many dimensions little beyond m = r / 3 is, so a query visits the
partitions with m <= reach * r, where `reach` is tuned to the recall that is asked for. Queries in the middle of a
dense partition visit no other, some visit dozens. All visits to a partition are one dense product in bfloat16, of
vectors relative to the partition's centre, whose scores are compared with the worst that their query has kept so far
before they leave the registers. Whole keys decide among the best.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.memory import MISSING
from spalm.neighbours.exclusion import Exclusion, QueryExclusion
from spalm.neighbours.join.layout import PartitionedVectors
from spalm.neighbours.join.visit_kernel import visit_partitions
from spalm.neighbours.kernels import borders_within, counting_sort_order
from spalm.neighbours.parallel import chunks
from spalm.neighbours.recall import HALF_PRECISION, Tolerance
from spalm.neighbours.topk import TopK

_COMPARED = 1 << 12
"""Queries whose candidates are compared by whole keys at a time."""
_MARGINS = 1 << 18
"""Margins that are held at a time: few enough to be in the cache when they are compared."""
_VISITED = 8 << 20
"""Bytes of partitions that are visited between two counts of what was read."""
FIRST_REACH = 0.1
"""Reach of a first round: the neighbours found in it make r smaller, so that the second round crosses fewer borders."""
_VISITS_WITHOUT_RADIUS = 16
"""Partitions visited by a query whose own partition holds fewer than K neighbours, so that r is not known."""


@dataclass(frozen=True)
class JoinPlan:
    """Plan of a join: how thoroughly it searches."""

    neighbours: int
    """Number of neighbours: K."""
    kept: int
    """Number of candidates, by distance in the scan space, that are compared by their whole keys."""
    near: int
    """Number of partitions, the nearest to a query's own, whose borders are considered."""
    reach: float
    """Share of the K-th neighbour's distance within which borders are crossed."""


@dataclass(frozen=True)
class JoinQueries:
    """The queries of a join, in the partitioned layout, and which entries of the memory they are."""

    vectors: PartitionedVectors
    """Vectors among which the queries are."""
    first_id: int | None
    """Entry id of the query at position 0; None where the queries are not entries."""
    count: int
    """Number of positions; vectors with other positions are not queries."""

    def positions(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the positions of rows; outside [0, count) where a row is not a query."""
        return self.vectors.label_of[rows] - (self.first_id or 0)

    def exclusion(self, rows: Int[np.ndarray, "n"], rule: Exclusion) -> QueryExclusion:
        """Returns what the queries in these rows must not find; queries that are not entries may find everything."""
        if self.first_id is None:
            return QueryExclusion.nothing(len(rows))
        return QueryExclusion(self.vectors.label_of[rows], self.vectors.document_of[rows], rule)


@dataclass(frozen=True)
class JoinTask:
    """Task of a join: find K neighbours of every query among the keys."""

    keys: PartitionedVectors
    """Keys to search."""
    queries: JoinQueries
    """Queries whose neighbours are wanted."""
    neighbours: int
    """Number of neighbours: K."""
    exclusion: Exclusion
    """Rule by which entries are excluded from their own neighbours."""
    tolerance: Tolerance = HALF_PRECISION
    """Differences that do not count when recall is judged."""


@dataclass(frozen=True)
class NearestEntries:
    """The neighbours of some queries, nearest first."""

    ids: Int[np.ndarray, "queries neighbours"]
    """Entry ids; MISSING where there is no neighbour."""
    distances: Float[np.ndarray, "queries neighbours"]
    """Squared distances between whole keys; infinite where there is no neighbour."""


@dataclass(frozen=True)
class Visits:
    """Pairs of a query and a partition that it visits, in the order of the partitions."""

    query: Int[np.ndarray, "n"]
    """Number of the visiting query."""
    partition: Int[np.ndarray, "n"]
    """Number of the visited partition."""
    margin: Float[np.ndarray, "n"]
    """Distance of the query to the partition's border."""

    def within(self, limits: Float[Tensor, "queries"]) -> Bool[np.ndarray, "n"]:
        """Returns which visits cross a border within the limit of their query."""
        return self.margin <= limits.numpy()[self.query]

    def __getitem__(self, which: np.ndarray) -> "Visits":
        return Visits(self.query[which], self.partition[which], self.margin[which])


class Join:
    """Finds the neighbours of queries, which are given as rows of the partitioned layout."""

    def __init__(self, task: JoinTask, plan: JoinPlan):
        self.keys, self.queries, self.exclusion, self.plan = task.keys, task.queries, task.exclusion, plan
        self.near = np.ascontiguousarray(self.keys.partitions.near[:, : plan.near])
        self.centres = torch.from_numpy(self.keys.partitions.centres)
        self.half_norms = self.centres.square().sum(1) / 2

    def block(self, first: int, last: int) -> tuple[Int[np.ndarray, "queries"], NearestEntries]:
        """Returns the positions and neighbours of the queries among rows [first, last)."""
        rows = np.arange(first, last)
        positions = self.queries.positions(rows)
        is_query = (positions >= 0) & (positions < self.queries.count)
        return positions[is_query], self.neighbours_of(rows[is_query])

    def neighbours_of(self, rows: Int[np.ndarray, "queries"]) -> NearestEntries:
        """Returns the neighbours of the queries in these rows, which must rise."""
        vectors, best = self.queries.vectors.scan(rows), self.new_topk(rows)
        visits = self.first_round(rows, vectors, best)
        self.visit(vectors, best, visits[visits.within(self.plan.reach * self.radius(best))])
        return self._compare_whole_keys(rows, best)

    def new_topk(self, rows: Int[np.ndarray, "queries"]) -> TopK:
        """Returns empty lists of candidates for the queries in these rows."""
        return TopK(self.queries.exclusion(rows, self.exclusion), self.plan.kept)

    def first_round(
        self, rows: Int[np.ndarray, "queries"], vectors: Float[Tensor, "queries width"], best: TopK
    ) -> Visits:
        """Searches the queries' own partitions and beyond the nearest borders.

        Returns the borders within reach that were not crossed yet.
        """
        own = self.queries.vectors.partition_of(rows).astype(np.int32)
        self.visit(vectors, best, Visits(np.arange(len(own), dtype=np.int32), own, np.zeros(len(own), np.float32)))
        visits, first = self._borders(own, vectors, self.radius(best))
        crossed = visits.within(first)
        self.visit(vectors, best, visits[crossed])
        return visits[~crossed]

    def radius(self, best: TopK) -> Float[Tensor, "queries"]:
        """Returns the distance of each query's K-th neighbour so far, infinite where there are fewer."""
        kth = torch.from_numpy(best.scores[:, min(self.plan.neighbours, best.count) - 1])
        return (-2 * kth).clamp_min_(0).sqrt_()

    def _borders(self, own, vectors, radius: Float[Tensor, "queries"]) -> tuple[Visits, Float[Tensor, "queries"]]:
        """Returns the borders within reach, and the margins up to which each query crosses them in the first round."""
        limits, first = self.plan.reach * radius, min(FIRST_REACH, self.plan.reach) * radius
        parts = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))]
        for partition, begin, end in _runs(own, _MARGINS // max(1, self.near.shape[1])):
            margins = self.margins(vectors[begin:end], partition)
            short = torch.isinf(limits[begin:end])
            if short.any() and margins.shape[1]:
                few = min(_VISITS_WITHOUT_RADIUS, margins.shape[1])
                first[begin:end][short] = margins[short].kthvalue(few, dim=1).values
            parts.append(borders_within(margins.numpy(), limits[begin:end].numpy(), self.near[partition], begin))
        found = Visits(*map(np.concatenate, zip(*parts)))
        return found[counting_sort_order(found.partition, len(self.centres))], first

    def margins(self, vectors: Float[Tensor, "queries width"], partition: int) -> Float[Tensor, "queries near"]:
        """Returns the distances of a partition's vectors to its borders with the partitions near it."""
        near = self.near[partition]
        ways = self.centres[near] - self.centres[partition]
        lengths = ways.square().sum(1).sqrt_().clamp_min_(1e-9)
        offsets = (self.half_norms[near] - self.half_norms[partition]) / lengths
        return torch.addmm(offsets, vectors, (ways / lengths[:, None]).T, alpha=-1)

    def visit(self, vectors: Float[Tensor, "queries width"], best: TopK, visits: Visits) -> None:
        """Scores the keys of the visited partitions."""
        exclusion, keys = best.exclusion, self.keys
        for first, last in self._visited_together(visits.partition):
            visit_partitions(
                vectors.numpy(),
                visits.query[first:last],
                visits.partition[first:last],
                keys.partitions.centres,
                keys.starts,
                keys.pairs,
                keys.half_norms,
                keys.label_of,
                keys.document_of,
                exclusion.own_ids,
                exclusion.own_documents,
                exclusion.rule.window,
                exclusion.rule.document,
                best.scores,
                best.rows,
            )

    def _visited_together(self, partition: Int[np.ndarray, "n"]) -> Iterator[tuple[int, int]]:
        """Yields ranges of visits to whole partitions, whose keys are not too many bytes."""
        borders = np.flatnonzero(np.diff(partition, prepend=-1, append=-1))
        sizes = np.diff(self.keys.starts)[partition[borders[:-1]]]
        together = np.cumsum(sizes) // max(1, _VISITED // self.keys.scan_bytes)
        for first, last in pairwise([*np.flatnonzero(np.diff(together, prepend=-1)).tolist(), len(sizes)]):
            self.keys.will_scan(int(sizes[first:last].sum()))
            yield int(borders[first]), int(borders[last])

    def _compare_whole_keys(self, rows, best: TopK) -> NearestEntries:
        """Returns the K nearest of the candidates, by distances between whole keys."""
        ids = np.full((len(rows), self.plan.neighbours), MISSING, np.int64)
        distances = np.full(ids.shape, np.inf, np.float32)
        for first, last in chunks(0, len(rows), _COMPARED):
            candidates, own = best.rows[first:last], self.queries.vectors.take(rows[first:last]).astype(np.float32)
            gaps = self.keys.squared_distances(own, candidates)
            order = np.argsort(gaps, axis=1, kind="stable")[:, : self.plan.neighbours]
            chosen = np.take_along_axis(candidates, order, 1)
            distances[first:last, : chosen.shape[1]] = np.take_along_axis(gaps, order, 1)
            ids[first:last, : chosen.shape[1]] = np.where(chosen == MISSING, MISSING, self.keys.label_of[chosen])
        return NearestEntries(ids, distances)


def _runs(partition: Int[np.ndarray, "n"], at_once: int) -> Iterator[tuple[int, int, int]]:
    """Yields (partition, begin, end) of every run of equal numbers, in pieces of at most `at_once`."""
    borders = np.flatnonzero(np.diff(partition, prepend=-1, append=-1))
    for begin, end in pairwise(borders.tolist()):
        number = int(partition[begin])
        for first, last in chunks(begin, end, max(1, at_once)):
            yield number, first, last
