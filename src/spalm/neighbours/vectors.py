"""Key vectors that need not fit into RAM: the interface to them, and random samples of them."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_RUN = 64
"""Consecutive rows that are sampled together."""


class Vectors(Protocol):
    """Key vectors with their labels and documents: the entries of a memory, or the queries of a split."""

    @property
    def width(self) -> int:
        """Dimensions of a key."""
        ...

    def __len__(self) -> int: ...

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        """Returns the keys of consecutive rows."""
        ...

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        """Returns the keys of any rows."""
        ...

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the ids of entries, or the positions of queries."""
        ...

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the document number of each row, MISSING where it has none; entries and queries share the numbers."""
        ...


def key_type(vectors: Vectors) -> str:
    """Returns the type of the keys as numpy writes it: float16 (the keys of a memory) or float32."""
    return vectors.keys(0, 0).dtype.newbyteorder("<").str


def sample_vectors(
    vectors: Vectors, count: int, seed: list[int], *, transform: Callable[[np.ndarray], Tensor] = torch.from_numpy
) -> Float[np.ndarray, "about_count width"]:
    """Returns about `count` keys in random order, from short runs of rows; each run is transformed as it is read."""
    random = np.random.default_rng(seed)
    runs = len(vectors) // _RUN
    chosen = np.sort(random.choice(runs, min(runs, -(-count // _RUN)), replace=False)) * _RUN
    rest = transform(vectors.keys(runs * _RUN, len(vectors))).numpy()
    found = np.empty((len(chosen) * _RUN + len(rest), rest.shape[1]), rest.dtype)
    places = random.permutation(len(found))
    for number, start in enumerate(chosen):
        found[places[number * _RUN : (number + 1) * _RUN]] = transform(vectors.keys(start, start + _RUN)).numpy()
    found[places[len(chosen) * _RUN :]] = rest
    return found
