"""The K best rows of every query, updated as blocks of keys are scored. A higher score is better."""

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from spalm.memory import MISSING
from spalm.neighbours.exclusion import QueryExclusion
from spalm.neighbours.kernels import update_topk


class TopK:
    """For each query, the `count` rows with the highest scores so far, best first."""

    def __init__(self, exclusion: QueryExclusion, count: int):
        self.exclusion, self.count = exclusion, count
        self.scores = np.full((len(exclusion), count), -np.inf, np.float32)
        self.rows = np.full((len(exclusion), count), MISSING, np.int64)

    def push(
        self,
        query: Int[np.ndarray, "queries"],
        products: Float[Tensor, "queries keys"],
        first_row: int,
        *,
        half_norms: Float[Tensor, "keys"],
        labels: Int[np.ndarray, "keys"],
        documents: Int[np.ndarray, "keys"],
    ) -> None:
        """Scores the keys in the rows from `first_row` on for the queries with the numbers `query`.

        No query may be given the same key twice.
        """
        exclusion = self.exclusion
        update_topk(
            products.numpy(),
            half_norms.numpy(),
            first_row,
            labels,
            documents,
            query,
            exclusion.own_ids,
            exclusion.own_documents,
            exclusion.rule.window,
            exclusion.rule.document,
            self.scores,
            self.rows,
        )

    def merge(self, others: list["TopK"]) -> None:
        """Keeps the best rows of itself and of others that have scored other keys for the same queries."""
        scores = np.concatenate([each.scores for each in (self, *others)], axis=1)
        rows = np.concatenate([each.rows for each in (self, *others)], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.count]
        self.scores, self.rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
