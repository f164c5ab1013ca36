"""Vectors in numbers that memory need not hold: what can be asked of them, and samples."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_RUN = 64
"""They are sampled in runs of so many neighbouring rows."""


class Vectors(Protocol):
    """The entries of a memory, or the queries of a split."""

    width: int

    def __len__(self) -> int: ...

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]: ...

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Ids of entries, or positions of queries."""

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """A number for the document of each row, the same for entries and queries; -1 where there is none."""


def sample(
    vectors: Vectors, count: int, seed: list[int], change: Callable[[np.ndarray], Tensor] = torch.from_numpy
) -> Float[np.ndarray, "about_count width"]:
    """About `count` of them from runs all over, each run changed as it is read, in random order."""
    random = np.random.default_rng(seed)
    runs = len(vectors) // _RUN
    chosen = np.sort(random.choice(runs, min(runs, -(-count // _RUN)), replace=False)) * _RUN
    parts = [change(vectors.keys(start, start + _RUN)).numpy() for start in chosen]
    rest = change(vectors.keys(runs * _RUN, len(vectors))).numpy()
    found = np.concatenate([*parts, rest])
    return found[random.permutation(len(found))]
