"""The search for the neighbours of a graph: small sets are compared whole, all others are joined."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from spalm.compute import Execution
from spalm.console import bar, say
from spalm.memory import MISSING
from spalm.neighbours.exact import exact_search
from spalm.neighbours.exclusion import NOT_AN_ENTRY, ONLY_ITSELF, QueryExclusion
from spalm.neighbours.graph.copies import Copies
from spalm.neighbours.graph.given_vectors import GivenVectors
from spalm.neighbours.graph.search_space import TOLERANCE, SearchSpace, SearchVectors
from spalm.neighbours.graph.settings import GraphSettings
from spalm.neighbours.graph.survey import lengths_of
from spalm.neighbours.join.bulk_join import BulkJoin, NeighbourSettings
from spalm.neighbours.join.cost import RamBudget, format_seconds, gflops_of_a_core
from spalm.neighbours.parallel import chunks, thread_map
from spalm.neighbours.scratch_files import release
from spalm.neighbours.table import drop_neighbours

FEW_VECTORS, FEW_QUERIES = 4096, 1024
"""Numbers of vectors, and of queries, up to which every query is compared with every vector."""
NAME = "graph"
"""Name of the queries in the files of the join."""
_GATHERED = 32 << 20
"""Bytes of candidates that exact search compares whole at a time."""
_WRITTEN = 1 << 14
"""Rows of the result that are written together."""


def compares_all(vectors: int, queries: int) -> bool:
    """Returns whether every query is compared with every vector."""
    return vectors <= FEW_VECTORS or queries <= FEW_QUERIES


@dataclass(frozen=True)
class FoundRows:
    """What a search has found, in the space of the search; of vectors with copies, the distinct ones."""

    ids: Int[np.ndarray, "rows some"]
    """Rows of the neighbours."""
    squared: Float[np.ndarray, "rows some"]
    """Their squared distances."""
    recall: float
    """Recall of the search."""
    judged: int
    """Number of rows by which it was measured."""
    facts: dict[str, Any]
    """Facts about the search for the manifest."""


@dataclass(frozen=True)
class GraphSearch:
    """The search for the neighbours of a graph."""

    settings: GraphSettings
    """Settings of the graph."""
    space: SearchSpace
    """Space in which it is searched."""
    given: list[GivenVectors]
    """The vectors and, if they are others, the queries."""
    copies: Copies | None
    """Which vectors are equal, where there are many copies of one."""
    budget: RamBudget
    """RAM and workers."""
    execution: Execution
    """Where the search runs."""

    @property
    def positions(self) -> int:
        """Number of rows of the graph."""
        return len(self.given[-1])

    @property
    def _own(self) -> bool:
        """Whether the graph is that of the vectors themselves."""
        return len(self.given) == 1

    @property
    def _same(self) -> bool:
        """Whether the queries are the same as the keys in the space of the search, too."""
        return self._own and self.settings.metric != "ip"

    def run(self, folder: Path, work: Path, *, more_disk: int) -> FoundRows:
        """Finds the neighbours with files in `folder` and `work`, besides which `more_disk` bytes will be needed."""
        distinct = None if self.copies is None else self.copies.distinct
        keys = SearchVectors(self.given[0], self.space, rows=distinct)
        queries = SearchVectors(self.given[-1], self.space, as_queries=True, rows=distinct if self._own else None)
        # A vector with copies is its own neighbour, unless these are known to be the nearest.
        excluding = self._own and (self.copies is None or self._same)
        count = self.settings.k + (self._own and not excluding)
        if compares_all(len(keys), len(queries)):
            return self._compare_all(keys, queries, count, excluding=excluding)
        settings = NeighbourSettings(count=count, held_out=count, recall=self.settings.recall, seed=self.settings.seed)
        join = BulkJoin(keys, settings, folder, work=work, budget=self.budget, engine=self.execution.engine)
        own = len(queries) if self._same else 0
        join.announce(own, len(queries) - own, more_disk=more_disk)
        join.prepare()
        found = join.find(
            NAME,
            len(queries),
            count,
            first_id=0 if excluding else None,
            queries=None if self._same else queries,
            tolerance=TOLERANCE,
        )
        facts = {**join.facts, "keys": len(keys), "plan": asdict(found.plan)}
        return FoundRows(found.ids, found.distances, found.recall, found.judged, facts)

    def _compare_all(self, keys: SearchVectors, queries: SearchVectors, k: int, *, excluding: bool) -> FoundRows:
        """Compares every query with every key."""
        number, workers = len(queries), self.budget.workers
        seconds = 2e-9 * len(keys) * number * keys.width / gflops_of_a_core() / workers
        say(
            f"neighbours: {number:,} positions among {len(keys):,} keys of width {keys.width}, "
            f"each compared with each; about {format_seconds(seconds)} on {workers} core(s)"
        )
        # More than are wanted: products in single precision may confuse those that are almost equally near.
        count = max(k, min(len(keys), 2 * k + 32))
        ids, squared = np.empty((number, k), np.int64), np.empty((number, k), np.float32)
        size = max(1, min(FEW_QUERIES, _GATHERED // (4 * keys.width * count)))
        with thread_map(workers) as parallel, bar("compare all", number) as shown:
            for first, last in chunks(0, number, size):
                nowhere = np.full(last - first, NOT_AN_ENTRY)
                own = np.arange(first, last) if excluding else nowhere
                exclusion = QueryExclusion(own, nowhere, ONLY_ITSELF)
                vectors = queries.keys(first, last).astype(np.float32)
                found, gaps = exact_search(vectors, keys, count, parallel=parallel, exclusion=exclusion)
                ids[first:last], squared[first:last] = found[:, :k], gaps[:, :k]
                shown.advance(last - first)
        return FoundRows(ids, squared, 1.0, number, {"exact": True})

    def write(self, found: FoundRows, indices: np.ndarray, distances: np.ndarray) -> None:
        """Writes the neighbours into the arrays of the result, distances by the metric."""
        given = self.given[-1]
        for first, last in chunks(0, self.positions, _WRITTEN):
            lengths = np.zeros(last - first)
            if self.settings.metric == "ip":
                lengths = np.concatenate([lengths_of(given.read(*part)) for part in chunks(first, last, 1024)])
            indices[first:last], squared = self._rows(found, first, last)
            distances[first:last] = self.space.distances(squared, lengths)
            release(found.ids, found.squared, indices, distances)
        for array in (indices, distances):
            if isinstance(array, np.memmap):
                array.flush()

    def _rows(self, found: FoundRows, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the neighbours of rows of the graph, and their squared distances."""
        if self.copies is None:
            return np.asarray(found.ids[first:last]), np.asarray(found.squared[first:last])
        rows, k = np.arange(first, last), self.settings.k
        which = self.copies.number_of[rows] if self._own else rows
        nearest = which if self._same else np.full(len(rows), MISSING)
        ids, squared = (np.asarray(array[which]) for array in (found.ids, found.squared))
        ids, squared = self.copies.spread(ids.astype(np.int64), squared, k + self._own, nearest=nearest)
        if self._own:
            ids, squared = drop_neighbours(ids, squared, ids == rows[:, None])
        return ids[:, :k], squared[:, :k]
