"""The best few rows of every query, kept while keys are shown to them. A score is better when it is higher."""

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from spalm.neighbours.exclusion import Askers
from spalm.neighbours.kernels import MISSING, keep_best


class Best:
    """For each query, the `count` rows with the highest scores so far, best first."""

    def __init__(self, askers: Askers, count: int):
        self.askers, self.count = askers, count
        self.scores = np.full((len(askers), count), -np.inf, np.float32)
        self.rows = np.full((len(askers), count), MISSING, np.int64)

    def offer(
        self,
        products: Float[Tensor, "asking keys"],
        half_norms: Float[Tensor, "keys"],
        first: int,
        labels: Int[np.ndarray, "keys"],
        documents: Int[np.ndarray, "keys"],
        query: Int[np.ndarray, "asking"],
    ) -> None:
        """Shows the keys in the rows from `first` on to the queries with the numbers `query`, to each of them once."""
        askers = self.askers
        keep_best(
            products.numpy(),
            half_norms.numpy(),
            first,
            labels,
            documents,
            query,
            askers.ids,
            askers.documents,
            askers.exclusion.window,
            askers.exclusion.document,
            self.scores,
            self.rows,
        )

    def take_in(self, others: list["Best"]) -> None:
        """Becomes the best of itself and of others that were shown other keys."""
        scores = np.concatenate([each.scores for each in (self, *others)], axis=1)
        rows = np.concatenate([each.rows for each in (self, *others)], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.count]
        self.scores, self.rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
