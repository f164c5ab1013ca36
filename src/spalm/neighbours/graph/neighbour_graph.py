"""The finished graph: nearest neighbours of vectors, and its forms for scikit-learn and umap-learn."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from pydantic import BaseModel
from scipy.sparse import csr_matrix

from spalm.artifact import Artifact
from spalm.choices import MetricName
from spalm.errors import DamagedError, InputError
from spalm.manifest import Count
from spalm.memory import MISSING
from spalm.neighbours.graph.settings import GraphSettings
from spalm.paths import user_path

KIND = "graph of neighbours"
"""Kind of artifact."""
VERSION = 1
"""Version of the files' format."""


@dataclass(frozen=True)
class NeighbourGraph:
    """The nearest neighbours of every vector of a set, or of queries, by one metric."""

    indices: Int[np.ndarray, "rows k"]
    """Rows of the neighbours in the vectors, nearest first; -1 where there are fewer than k."""
    distances: Float[np.ndarray, "rows k"]
    """Distances of the neighbours, infinite where there is none.

    With l2, the Euclidean distance (not its square); with cosine, 1 - cosine; with ip, minus the inner product."""
    recall: float
    """Share of the true neighbours that were found, measured on a sample; 1 where the search was exact."""
    judged: int
    """Number of rows in that sample."""
    metric: MetricName
    """Metric of the distances."""
    vectors: int
    """Number of vectors among which the neighbours are."""
    own: bool
    """Whether the rows are the vectors themselves; no vector is in its own row then."""

    def to_csr(self, *, include_self: bool | None = None, symmetric: bool = False) -> csr_matrix:
        """Returns the distances as a sparse matrix, rows in rising order of distance, for `metric="precomputed"`.

        Args:
            include_self: Whether each vector is the first neighbour of itself, at distance 0: scikit-learn expects
                this where it gets the graph of what it is fitted to, as its `KNeighborsTransformer` makes it. By
                default, yes in the graph of a set, unless the metric is ip; a graph of queries has no such entries.
            symmetric: Whether neighbours hold in both directions, which `sklearn.cluster.HDBSCAN` requires.
        """
        include_self = self.own and self.metric != "ip" if include_self is None else include_self
        if symmetric and not self.own:
            raise InputError("a graph of queries has no other direction; leave symmetric out")
        indices, distances = self._with_themselves() if include_self else (self._checked(), self.distances)
        there = indices != MISSING
        row = np.repeat(np.arange(len(indices)), there.sum(1))
        column, distance = indices[there], np.asarray(distances)[there]
        if symmetric:
            row, column, distance = _both_directions(row, column, distance)
        starts = np.searchsorted(row, np.arange(len(indices) + 1))
        return csr_matrix((distance, column, starts), shape=(len(indices), self.vectors))

    def for_umap(self) -> tuple[Int[np.ndarray, "rows more"], Float[np.ndarray, "rows more"]]:
        """Returns indices and distances for `umap.UMAP(precomputed_knn=...)`: each vector comes first in its own row.

        They serve for every `n_neighbors` up to k + 1, since UMAP counts the vector itself.
        """
        return self._with_themselves()

    def _with_themselves(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns indices and distances with each vector before its neighbours."""
        if not self.own:
            raise InputError("in a graph of queries no vector is its own neighbour; make the graph without queries")
        if self.metric == "ip":
            raise InputError("with ip a vector is not nearest to itself; make the graph with cosine or l2")
        own = np.arange(len(self.indices))[:, None]
        zeros = np.zeros(own.shape, np.float32)
        return np.hstack([own, self._checked()]), np.hstack([zeros, self.distances])

    def _checked(self) -> np.ndarray:
        """Returns the indices; refuses such as are not those of vectors, because libraries trust them."""
        if self.indices.size and not MISSING <= self.indices.min() <= self.indices.max() < self.vectors:
            raise DamagedError("the graph is damaged (it names rows that do not exist); make it again")
        return np.asarray(self.indices)


def _both_directions(row: np.ndarray, column: np.ndarray, distance: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the entries of a matrix and of its transpose, each once, by rows and rising distance."""
    row, column, distance = np.concatenate([row, column]), np.concatenate([column, row]), np.tile(distance, 2)
    order = np.lexsort((distance, column, row))
    row, column, distance = row[order], column[order], distance[order]
    first = (np.diff(row, prepend=-1) != 0) | (np.diff(column, prepend=-1) != 0)
    row, column, distance = row[first], column[first], distance[first]
    order = np.lexsort((distance, row))
    return row[order], column[order], distance[order]


class GraphFacts(BaseModel):
    """The form of a graph's facts."""

    recall: float
    judged: Count
    vectors: Count


def load_knn_graph(out: Path | str) -> NeighbourGraph:
    """Opens a graph that `knn_graph` or `spalm knn` has written to a folder; its arrays are mapped, not read."""
    stored = Artifact(user_path(out), KIND, GraphFacts)
    indices, distances, facts = stored.array("indices"), stored.array("distances"), stored.facts
    if indices.ndim != 2 or indices.shape != distances.shape or indices.dtype != "<i8" or distances.dtype != "<f4":
        raise DamagedError(f"{stored.directory} is damaged (its arrays do not fit each other); make it again")
    settings = GraphSettings.parse(stored.manifest["settings"], str(stored.directory))
    own = "queries" not in stored.manifest["parents"]
    if own and len(indices) != facts["vectors"]:
        raise DamagedError(f"{stored.directory} is damaged (it has rows for other vectors); make it again")
    return NeighbourGraph(indices, distances, facts["recall"], facts["judged"], settings.metric, facts["vectors"], own)
