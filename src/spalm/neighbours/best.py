"""The best few rows of every query, kept while candidates come in. A score is better when it is higher."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

NOTHING = -1
"""In place of the row or the id of a neighbour where there are not enough of them."""


@dataclass(frozen=True)
class Candidates:
    """Triples of a query, a row and its score."""

    query: Int[np.ndarray, "n"]
    row: Int[np.ndarray, "n"]
    score: Float[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.query)

    def where(self, kept: np.ndarray) -> "Candidates":
        return Candidates(self.query[kept], self.row[kept], self.score[kept])

    @classmethod
    def joined(cls, parts: list["Candidates"]) -> "Candidates":
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("query", "row", "score")))


class Best:
    """For each of `queries`, the `count` rows with the highest scores so far, best first."""

    def __init__(self, queries: int, count: int):
        self.count = count
        self.scores = np.full((queries, count), -np.inf, np.float32)
        self.rows = np.full((queries, count), NOTHING, np.int64)

    @property
    def bar(self) -> Float[np.ndarray, "queries"]:
        """What a candidate has to beat: minus infinity while there are not `count` rows yet."""
        return self.scores[:, -1]

    def offer(self, candidates: Candidates) -> None:
        """Takes in candidates, none of which was offered before."""
        if not len(candidates):
            return
        # One sort by query and falling score: each query's candidates stand together, best first.
        order = np.argsort(candidates.query.astype(np.int64) << 32 | _falling(candidates.score), kind="stable")
        query = candidates.query[order]
        first = np.flatnonzero(np.diff(query, prepend=-1))
        touched = query[first]
        place = np.repeat(np.arange(len(first)), np.diff(first, append=len(query)))
        rank = np.arange(len(query)) - first[place]
        kept = rank < self.count
        order, place, rank = order[kept], place[kept], rank[kept]
        scores = np.full((len(touched), 2 * self.count), -np.inf, np.float32)
        rows = np.full((len(touched), 2 * self.count), NOTHING, np.int64)
        scores[:, : self.count], rows[:, : self.count] = self.scores[touched], self.rows[touched]
        scores[place, self.count + rank] = candidates.score[order]
        rows[place, self.count + rank] = candidates.row[order]
        best, columns = torch.from_numpy(scores).topk(self.count)
        self.scores[touched] = best.numpy()
        self.rows[touched] = np.take_along_axis(rows, columns.numpy(), 1)


def _falling(scores: Float[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Integers below 2^32 in the opposite order of the scores: what the bits of a float are, but for its sign."""
    bits = scores.astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, bits & 0xFFFFFFFF, 0x7FFFFFFF - bits)


def positive(scores: Float[Tensor, "queries rows"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(query, row, score) of what is above zero: few, so that all the work is one comparison of each score."""
    flat = scores.reshape(-1).numpy()
    hits = np.flatnonzero(flat > 0)
    query = hits // scores.shape[1]
    return query, hits - query * scores.shape[1], flat[hits]


def highest(scores: Float[Tensor, "queries rows"], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(query, row, score) of the `count` highest of every query, leaving out minus infinity."""
    best, rows = scores.topk(min(count, scores.shape[1]))
    query, column = torch.nonzero(best > -torch.inf, as_tuple=True)
    return query.numpy(), rows[query, column].numpy(), best[query, column].numpy()
