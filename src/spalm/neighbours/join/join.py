"""The bulk join: the neighbours of many queries at once, partition by partition.

A query first looks for neighbours at home, in its own partition. The K-th of them lies at a distance r, and the border
to partition g at a distance m, the margin:

    m = (|q - c_g|^2 - |q - c_home|^2) / (2 |c_g - c_home|)

Nothing beyond a border with m >= r can be nearer. In many dimensions little beyond m = r / 3 is, so it looks into the
partitions with m <= reach * r, where `reach` is tuned to the recall that is asked for. Queries in the middle of a
dense partition look nowhere else, others into dozens. What a partition is asked for is one dense product, and one
compiled pass compares each score with the worst that its query has kept so far.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.neighbours.exclusion import Askers, Exclusion
from spalm.neighbours.join.layout import Ordered
from spalm.neighbours.kernels import MISSING, borders_within, order_of
from spalm.neighbours.topk import Best
from spalm.neighbours.workers import chunks

_COMPARED = 1 << 14
"""Queries whose candidates are compared by whole keys at a time."""
_SCORES = 1 << 18
"""Scores that are held at a time: few enough to be in the cache when they are looked at."""
BEGINNING = 0.1
"""Reach of a first round: what it finds brings r down, and the second round has fewer borders to cross."""
_SHORT_OF_NEIGHBOURS = 16
"""Partitions looked into by a query that did not find enough at home to say how far away they are."""


@dataclass(frozen=True)
class Plan:
    """How thoroughly the join looks."""

    neighbours: int
    """K."""
    kept: int
    """Candidates by the scan's distance that are compared by their whole keys."""
    near: int
    """Partitions, the nearest to a query's own, whose borders are looked at."""
    reach: float
    """Borders nearer than this share of the K-th distance are crossed."""


@dataclass(frozen=True)
class Queries:
    """Rows of an ordered copy that are to be answered, and who they are in the memory."""

    ordered: Ordered
    first_id: int | None
    """Entry of the query at position 0, where the queries are entries themselves."""
    count: int
    """Positions there are: of entries, those beyond are not asked for."""

    def positions(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        return self.ordered.label_of[rows] - (self.first_id or 0)

    def askers(self, rows: Int[np.ndarray, "n"], exclusion: Exclusion) -> Askers:
        """Who asks in these rows: queries that are not entries may find anything."""
        if self.first_id is None:
            return Askers.strangers(len(rows))
        return Askers(self.ordered.label_of[rows], self.ordered.document_of[rows], exclusion)


@dataclass(frozen=True)
class Found:
    ids: Int[np.ndarray, "queries neighbours"]
    distances: Float[np.ndarray, "queries neighbours"]
    """Squared, between whole keys; infinite where there is no neighbour."""


@dataclass(frozen=True)
class Visits:
    """Which queries look into which partitions, in the order of the partitions."""

    query: Int[np.ndarray, "n"]
    partition: Int[np.ndarray, "n"]
    margin: Float[np.ndarray, "n"]
    """How far the border lies from the query."""

    def within(self, limits: Float[Tensor, "queries"]) -> np.ndarray:
        return self.margin <= limits.numpy()[self.query]

    def __getitem__(self, which: np.ndarray) -> "Visits":
        return Visits(self.query[which], self.partition[which], self.margin[which])


class Join:
    """Answers queries, given as rows of an ordered copy."""

    def __init__(self, keys: Ordered, queries: Queries, plan: Plan, exclusion: Exclusion):
        self.keys, self.queries, self.plan, self.exclusion = keys, queries, plan, exclusion
        self.near = np.ascontiguousarray(keys.partitions.near[:, : plan.near])
        self.centres = torch.from_numpy(keys.partitions.centres)
        self.half_norms = self.centres.square().sum(1) / 2

    def block(self, first: int, last: int) -> tuple[Int[np.ndarray, "queries"], Found]:
        """The positions of the queries in rows [first, last), as far as they are asked for, and their neighbours."""
        rows = np.arange(first, last)
        positions = self.queries.positions(rows)
        asked = (positions >= 0) & (positions < self.queries.count)
        return positions[asked], self.answer(rows[asked])

    def answer(self, rows: Int[np.ndarray, "queries"]) -> Found:
        """The neighbours of rows of the queries, which are given in rising order."""
        vectors, best = self.queries.ordered.scan(rows), self.empty(rows)
        visits = self.begin(rows, vectors, best)
        self._look(vectors, best, visits[visits.within(self.plan.reach * self.radius(rows, best))])
        return self._compare_whole_keys(rows, best)

    def empty(self, rows: Int[np.ndarray, "queries"]) -> Best:
        return Best(self.queries.askers(rows, self.exclusion), self.plan.kept)

    def begin(self, rows, vectors: Float[Tensor, "queries width"], best: Best) -> Visits:
        """Looks at home and over the nearest borders. Returns the borders within reach that were not crossed yet."""
        home = self.queries.ordered.partition_of(rows)
        self._look(vectors, best, Visits(np.arange(len(home), dtype=np.int32), home, np.zeros(len(home), np.float32)))
        visits, first = self._borders(home, vectors, self.radius(rows, best))
        crossed = visits.within(first)
        self._look(vectors, best, visits[crossed])
        return visits[~crossed]

    def radius(self, rows: Int[np.ndarray, "queries"], best: Best) -> Float[Tensor, "queries"]:
        """The distance of the K-th neighbour so far, infinite where there are fewer."""
        kth = torch.from_numpy(best.scores[:, min(self.plan.neighbours, best.count) - 1])
        half_norms = self.queries.ordered.half_norms[torch.from_numpy(rows)]
        return (2 * (half_norms - kth)).clamp_min_(0).sqrt_()

    def _borders(self, home, vectors, radius: Float[Tensor, "queries"]) -> tuple[Visits, Float[Tensor, "queries"]]:
        """The borders within reach; and the margins up to which each query crosses them in the first round."""
        limits, first = self.plan.reach * radius, min(BEGINNING, self.plan.reach) * radius
        parts = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))]
        for partition, begin, end in _runs(home, lambda _: _SCORES // max(1, self.near.shape[1])):
            margins = self.margins(vectors[begin:end], partition)
            short = torch.isinf(limits[begin:end])
            if short.any() and margins.shape[1]:
                few = min(_SHORT_OF_NEIGHBOURS, margins.shape[1])
                first[begin:end][short] = margins[short].kthvalue(few, dim=1).values
            parts.append(borders_within(margins.numpy(), limits[begin:end].numpy(), self.near[partition], begin))
        found = Visits(*map(np.concatenate, zip(*parts)))
        return found[order_of(found.partition, len(self.centres))], first

    def margins(self, vectors: Float[Tensor, "queries width"], partition: int) -> Float[Tensor, "queries near"]:
        """How far vectors of a partition are from its borders with the partitions near it."""
        near = self.near[partition]
        ways = self.centres[near] - self.centres[partition]
        lengths = ways.square().sum(1).sqrt_().clamp_min_(1e-9)
        offsets = (self.half_norms[near] - self.half_norms[partition]) / lengths
        return torch.addmm(offsets, vectors, (ways / lengths[:, None]).T, alpha=-1)

    def _look(self, vectors, best: Best, visits: Visits) -> None:
        """Shows queries the keys of the partitions that they visit."""
        sizes = np.diff(self.keys.starts)
        for partition, begin, end in _runs(visits.partition, lambda number: _SCORES // max(1, int(sizes[number]))):
            place = slice(*self.keys.starts[partition : partition + 2].tolist())
            query = visits.query[begin:end]
            products = vectors.index_select(0, torch.from_numpy(query)) @ self.keys.scan(place).T
            labels, documents = self.keys.label_of[place], self.keys.document_of[place]
            best.offer(products, self.keys.half_norms[place], place.start, labels, documents, query)

    def _compare_whole_keys(self, rows, best: Best) -> Found:
        """The K nearest of the candidates, by distances between whole keys."""
        ids = np.full((len(rows), self.plan.neighbours), MISSING, np.int64)
        distances = np.full(ids.shape, np.inf, np.float32)
        for first, last in chunks(0, len(rows), _COMPARED):
            candidates, own = best.rows[first:last], self.queries.ordered.take(rows[first:last]).astype(np.float32)
            gaps = self.keys.squared_distances(own, candidates)
            order = np.argsort(gaps, axis=1, kind="stable")[:, : self.plan.neighbours]
            chosen = np.take_along_axis(candidates, order, 1)
            distances[first:last, : chosen.shape[1]] = np.take_along_axis(gaps, order, 1)
            ids[first:last, : chosen.shape[1]] = np.where(chosen == MISSING, MISSING, self.keys.label_of[chosen])
        return Found(ids, distances)


def _runs(partition: Int[np.ndarray, "n"], at_once) -> Iterator[tuple[int, int, int]]:
    """(partition, begin, end) of every run of equal numbers, in pieces of at most `at_once(partition)`."""
    borders = np.flatnonzero(np.diff(partition, prepend=-1, append=-1))
    for begin, end in pairwise(borders.tolist()):
        number = int(partition[begin])
        for first, last in chunks(begin, end, max(1, at_once(number))):
            yield number, first, last
