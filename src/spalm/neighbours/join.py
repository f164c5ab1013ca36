"""The bulk join: the neighbours of many queries at once, partition by partition.

A query first looks for neighbours at home, in its own partition. The K-th of them lies at a distance r, and the border
to partition g at a distance m, the margin:

    m = (|q - c_g|^2 - |q - c_home|^2) / (2 |c_g - c_home|)

Nothing beyond a border with m >= r can be nearer. In many dimensions little beyond m = r / 3 is, so it looks into the
partitions with m <= reach * r, where `reach` is tuned to the recall that is asked for. Queries in the middle of a
dense partition look nowhere else, others into dozens. What a partition is asked for is one dense product.

Scores are q.k - |k|^2 / 2, which falls as the distance grows and is a product of vectors with one more dimension. With
yet another, holding what the query has already, a candidate is simply a positive number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.neighbours.best import NOTHING, Best, Candidates, highest, positive
from spalm.neighbours.exclusion import STRANGER, Exclusion
from spalm.neighbours.ordered import Ordered
from spalm.neighbours.workers import chunks

_COMPARED = 1 << 18
"""Numbers of candidates' whole keys that are in the cache at a time."""
_SCORES = 1 << 21
"""Scores that are held at a time."""
_CANDIDATES = 1 << 22
"""Candidates that are collected before they are offered."""
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
        return self.ordered.labels[rows] - (self.first_id or 0)

    def own(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """The ids of rows, by which they are kept from finding themselves."""
        return np.full(rows.shape, STRANGER) if self.first_id is None else self.ordered.labels[rows]


@dataclass(frozen=True)
class Found:
    ids: Int[np.ndarray, "queries neighbours"]
    distances: Float[np.ndarray, "queries neighbours"]
    """Squared, between whole keys; infinite where there is no neighbour."""


class Join:
    """Answers queries, given as rows of an ordered copy."""

    def __init__(self, keys: Ordered, queries: Queries, plan: Plan, exclusion: Exclusion):
        self.keys, self.queries, self.plan, self.exclusion = keys, queries, plan, exclusion
        self.near = np.ascontiguousarray(keys.partitions.near[:, : plan.near])
        self.centres = torch.from_numpy(keys.partitions.centres)
        self.half_norms = self.centres.square().sum(1) / 2
        self.only_itself = not exclusion.window and not exclusion.document and queries.ordered is keys
        # A query's own entry is at home; one that is no entry may find anything.
        self.free_elsewhere = self.only_itself or queries.first_id is None

    def block(self, first: int, last: int) -> tuple[Int[np.ndarray, "queries"], Found]:
        """The positions of the queries in rows [first, last), as far as they are asked for, and their neighbours."""
        rows = np.arange(first, last)
        positions = self.queries.positions(rows)
        asked = (positions >= 0) & (positions < self.queries.count)
        return positions[asked], self.answer(rows[asked], self.queries.ordered.partition_of(rows[asked]))

    def answer(self, rows: Int[np.ndarray, "queries"], home: Int[np.ndarray, "queries"]) -> Found:
        """The neighbours of rows of the queries, which are given in rising order with their partitions."""
        if not len(rows):
            nothing = np.zeros((0, self.plan.neighbours))
            return Found(nothing.astype(np.int64), nothing.astype(np.float32))
        vectors = self.queries.ordered.scan(rows)
        best = Best(len(rows), self.plan.kept)
        seen = self.begin(rows, home, vectors, best)
        if self.plan.reach > BEGINNING:
            self._visit(rows, home, vectors, best, seen, self.plan.reach)
        return self._compare_whole_keys(rows, best)

    def begin(self, rows, home, vectors: Float[Tensor, "queries width"], best: Best) -> Float[Tensor, "queries"]:
        """Looks at home and over the nearest borders. Returns the margins up to which each query has looked."""
        self._look_at_home(rows, home, vectors, best)
        nowhere = torch.full((len(rows),), -torch.inf)
        return self._visit(rows, home, vectors, best, nowhere, min(BEGINNING, self.plan.reach))

    def _visit(self, rows, home, vectors, best: Best, seen, reach: float) -> Float[Tensor, "queries"]:
        """Visits the partitions whose margins are beyond those `seen` and within `reach`."""
        query, partition, limits = self._visits(home, vectors, seen, reach * self.radius(vectors, best))
        self._look_elsewhere(rows, vectors, best, query, partition)
        return limits

    def _look_at_home(self, rows, home, vectors: Float[Tensor, "queries width"], best: Best) -> None:
        """The best of the queries' own partitions."""

        def look(partition: int, first: int, last: int) -> None:
            own = slice(*self.keys.starts[partition : partition + 2])
            scores = torch.addmm(-self.keys.half_norms[own], vectors[first:last], self.keys.scan(own).T)
            if self.only_itself:
                scores[torch.arange(last - first), torch.from_numpy(rows[first:last] - own.start)] = -torch.inf
            else:
                self._forbid(scores, rows[first:last], own)
            count = min(self.plan.kept, own.stop - own.start)
            found, place = scores.topk(count)
            best.scores[first:last, :count] = found
            best.rows[first:last, :count] = place + own.start

        self._by_partition(look, home)
        best.rows[np.isinf(best.scores)] = NOTHING

    def radius(self, vectors, best: Best) -> Float[Tensor, "queries"]:
        """The distance of the K-th neighbour so far, infinite where there are fewer."""
        kth = torch.from_numpy(best.scores[:, min(self.plan.neighbours, best.count) - 1])
        return (vectors.square().sum(1) - 2 * kth).clamp_min_(0).sqrt_()

    def _visits(self, home, vectors, seen: Float[Tensor, "queries"], reach: Float[Tensor, "queries"]):
        """Which query is to visit which partition, in the order of the partitions; and up to which margin that is."""
        limits = reach.clone()

        def cross(partition: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
            near = self.near[partition]
            margins = self.margins(vectors[first:last], partition)
            limits[first:last] = self._limits(margins, reach[first:last])
            wanted = (margins > seen[first:last, None]) & (margins <= limits[first:last, None])
            visits = np.flatnonzero(wanted.numpy())
            query = visits // max(1, len(near))
            return (query + first).astype(np.int32), near[visits - query * len(near)]

        query, partition = map(np.concatenate, zip(*self._by_partition(cross, home)))
        order = np.argsort(partition, kind="stable")
        return query[order], partition[order], limits

    def margins(self, vectors: Float[Tensor, "queries width"], partition: int) -> Float[Tensor, "queries near"]:
        """How far vectors of a partition are from its borders with the partitions near it."""
        near = self.near[partition]
        ways = self.centres[near] - self.centres[partition]
        lengths = ways.square().sum(1).sqrt_().clamp_min_(1e-9)
        offsets = (self.half_norms[near] - self.half_norms[partition]) / lengths
        return torch.addmm(offsets, vectors, (ways / lengths[:, None]).T, alpha=-1)

    @staticmethod
    def _limits(margins: Float[Tensor, "queries near"], reach: Float[Tensor, "queries"]) -> Float[Tensor, "queries"]:
        """Up to which margin borders are crossed: a few of them where no distance is known yet."""
        short = torch.isinf(reach)
        if not short.any() or not margins.shape[1]:
            return reach
        few = margins[short].kthvalue(min(_SHORT_OF_NEIGHBOURS, margins.shape[1]), dim=1).values
        return reach.masked_scatter(short, few)

    def _look_elsewhere(self, rows, vectors, best: Best, query, partition) -> None:
        """Offers what beats the bars of the queries in the partitions that they visit.

        Where a query has no bar yet, or a partition would offer too much, it is the best few of each partition.
        """
        bars = torch.from_numpy(best.bar.copy())
        no_bar = torch.isinf(bars)
        bars[no_bar] = 0.0

        collected: list[Candidates] = []
        held = [0]

        def look(partition: int, first: int, last: int) -> None:
            place, queries = slice(*self.keys.starts[partition : partition + 2]), query[first:last]
            index = torch.from_numpy(queries)
            asking, own_bars = vectors.index_select(0, index), bars.index_select(0, index)
            scores = torch.addmm(-self.keys.half_norms[place], asking, self.keys.scan(place).T)
            scores.sub_(own_bars[:, None])
            who, row, score = self._worth_keeping(scores, no_bar.index_select(0, index), rows[queries], place)
            found = Candidates(queries[who], row + place.start, score + own_bars.numpy()[who])
            collected.append(
                found if self.free_elsewhere else found.where(~self._forbidden(rows[found.query], found.row))
            )
            held[0] += len(found)
            if held[0] > _CANDIDATES:
                best.offer(Candidates.joined(collected))
                collected.clear()
                held[0] = 0

        self._by_partition(look, partition)
        if collected:
            best.offer(Candidates.joined(collected))

    def _worth_keeping(self, scores: Tensor, no_bar: Bool[Tensor, "queries"], rows, place: slice):
        """(query, row, score) of what is above zero; of the best few where that is no bar, or far too low a one."""
        parts = []
        if no_bar.any():
            which = torch.nonzero(no_bar)[:, 0]
            few = scores[which]
            self._forbid(few, rows[which.numpy()], place)
            query, *rest = highest(few, self.plan.kept)
            parts.append((which.numpy()[query], *rest))
            scores[which] = -1.0
        found = positive(scores)
        if len(found[0]) > 4 * self.plan.kept * len(rows):
            self._forbid(scores, rows, place)
            query, row, score = highest(scores, self.plan.kept)
            found = query[score > 0], row[score > 0], score[score > 0]
        return tuple(map(np.concatenate, zip(found, *parts)))

    def _by_partition(self, look: Callable[[int, int, int], Any], partition: Int[np.ndarray, "n"]) -> list[Any]:
        """Calls look(partition, first, last) for every run of equal numbers, in pieces that do not take much memory."""
        borders = np.flatnonzero(np.diff(partition, prepend=-1, append=-1))
        return [
            look(int(partition[begin]), first, last)
            for begin, end in pairwise(borders)
            for first, last in chunks(begin, end, self._queries_at_once(partition[begin]))
        ]

    def _compare_whole_keys(self, rows, best: Best) -> Found:
        """The K nearest of the candidates, by distances between whole keys."""
        ids = np.full((len(rows), self.plan.neighbours), NOTHING, np.int64)
        distances = np.full(ids.shape, np.inf, np.float32)

        for first, last in chunks(0, len(rows), max(1, _COMPARED // (self.keys.width * best.count))):
            candidates = best.rows[first:last]
            own = torch.from_numpy(self.queries.ordered.take(rows[first:last])).float()[:, None]  # (queries, 1, width)
            theirs = torch.from_numpy(self.keys.take(candidates.clip(0))).float()  # (queries, candidates, width)
            gaps = theirs.sub_(own).square_().sum(2)
            gaps[torch.from_numpy(candidates == NOTHING)] = torch.inf
            nearest, place = gaps.topk(min(self.plan.neighbours, best.count), largest=False)
            chosen = np.take_along_axis(candidates, place.numpy(), 1)
            distances[first:last, : chosen.shape[1]] = nearest.numpy()
            ids[first:last, : chosen.shape[1]] = np.where(chosen == NOTHING, NOTHING, self.keys.labels[chosen])
        return Found(ids, distances)

    def _queries_at_once(self, partition: int) -> int:
        """So many that their scores of a partition do not take much memory."""
        size = int(self.keys.starts[partition + 1] - self.keys.starts[partition])
        return max(1, _SCORES // max(size, self.near.shape[1]))

    def _forbid(self, scores: Tensor, rows: Int[np.ndarray, "queries"], place: slice) -> None:
        if self.queries.first_id is not None:
            keys = np.arange(place.start, place.stop)
            scores[torch.from_numpy(self._forbidden(rows[:, None], keys[None]))] = -torch.inf

    def _forbidden(self, rows: Int[np.ndarray, "*n"], keys: Int[np.ndarray, "*n"]) -> np.ndarray:
        queries = self.queries
        return self.exclusion.forbids(
            queries.own(rows), queries.ordered.documents[rows], self.keys.labels[keys], self.keys.documents[keys]
        )
