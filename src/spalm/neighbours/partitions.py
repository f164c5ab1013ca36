"""Partitions of the keys: two levels of k-means in a space of fewer dimensions, and which partitions lie near which.

A key belongs to the partition whose centre is nearest. Centres are found in two levels, groups and the partitions of
a group, so neither learning nor assigning ever compares a key with all centres. Partitions are numbered group after
group: those with near numbers lie near each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.numpy import load, save
from torch import Tensor

from spalm.artifact import write_atomically
from spalm.console import bar
from spalm.memory import principal_axes
from spalm.neighbours.vectors import Vectors, sample
from spalm.neighbours.workers import Map

BEAM = 3
"""Groups whose partitions a key is compared with."""
NEAR = 256
"""Partitions known to lie near each one: as many as a query may look into besides its own."""
POINTS = 32
"""Sampled keys for each partition to be learned."""
_ENERGY = 0.95
"""Share of the keys' variance that the dimensions for the scan must hold."""
_STEP = 32
"""Widths of the scan are multiples of this."""
_AT_ONCE = 1024
"""Keys that are projected at a time."""


@dataclass(frozen=True)
class Space:
    """Where partitions live and scans are made: the keys' principal axes, as many as matter."""

    mean: Float[np.ndarray, "full"]
    rotation: Float[np.ndarray, "full width"]
    """Orthonormal columns, so a distance in the space is never longer than the whole one; empty: all is kept."""

    @property
    def width(self) -> int:
        return self.rotation.shape[1] or len(self.mean)

    @property
    def reduced(self) -> bool:
        return self.width < len(self.mean)

    def project(self, keys: np.ndarray) -> Float[Tensor, "n width"]:
        vectors = torch.from_numpy(np.asarray(keys))
        if self.reduced:
            rotation = torch.from_numpy(self.rotation)
            offset = -torch.from_numpy(self.mean) @ rotation
            # Few at a time: in single precision they stay in the cache.
            return torch.cat([torch.addmm(offset, part.float(), rotation) for part in vectors.split(_AT_ONCE)])
        return vectors.float() - torch.from_numpy(self.mean) if self.mean.any() else vectors.float()


@dataclass(frozen=True)
class Partitions:
    space: Space
    groups: Float[np.ndarray, "groups reduced"]
    bounds: Int[np.ndarray, "groups+1"]
    """Partitions of group g: from bounds[g] to bounds[g + 1]."""
    centres: Float[np.ndarray, "partitions reduced"]
    near: Int[np.ndarray, "partitions near"]
    """The nearest other partitions of each."""

    def __len__(self) -> int:
        return len(self.centres)

    @property
    def group_of_each(self) -> Int[np.ndarray, "partitions"]:
        return np.repeat(np.arange(len(self.groups)), np.diff(self.bounds))

    def assign(self, vectors: Float[np.ndarray, "n width"]) -> Int[np.ndarray, "n"]:
        """The nearest partition of each vector, looked for in the BEAM nearest groups."""
        beam = min(BEAM, len(self.groups))
        _, groups = faiss.knn(vectors, self.groups, beam)
        order = np.argsort(groups.ravel(), kind="stable")
        borders = np.searchsorted(groups.ravel()[order], np.arange(len(self.groups) + 1))
        nearest, found = np.full(len(vectors), np.inf, np.float32), np.zeros(len(vectors), np.int32)
        for group in np.flatnonzero(np.diff(borders)):
            rows = order[borders[group] : borders[group + 1]] // beam
            first, last = self.bounds[group], self.bounds[group + 1]
            distance, index = faiss.knn(vectors[rows], self.centres[first:last], 1)
            closer = distance[:, 0] < nearest[rows]
            nearest[rows[closer]] = distance[closer, 0]
            found[rows[closer]] = first + index[closer, 0]
        return found

    def save(self, path: Path) -> None:
        arrays = {**vars(self.space), **{name: array for name, array in vars(self).items() if name != "space"}}
        write_atomically(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))

    @classmethod
    def load(cls, path: Path) -> "Partitions":
        arrays = load(path.read_bytes())
        return cls(Space(arrays.pop("mean"), arrays.pop("rotation")), **arrays)


def partition_size(keys: int, neighbours: int) -> int:
    """Keys of a partition: more of them in a larger memory, so that partitions do not become too many."""
    return max(2 * neighbours, round(384 * max(1.0, keys / 1e6) ** 0.25))


def partition(
    vectors: Vectors, count: int, seed: int, most_points: Callable[[int], int], in_parallel: Map
) -> Partitions:
    """About `count` partitions of `vectors`, from samples; `most_points`: how large one may be, by its width."""
    with bar(f"learn {count:,} partitions", None):
        space = learn_space(sample(vectors, 1 << 16, [seed, 0]))
        points = sample(vectors, min(POINTS * count, most_points(space.width)), [seed, 1], space.project)
        return learn_partitions(points, space, count, seed, in_parallel)


def learn_space(keys: Float[np.ndarray, "n full"], width: int | None = None) -> Space:
    """The principal axes of the keys: `width` of them, by default as many as hold _ENERGY of the variance.

    Where that would save less than half of the work, nothing is left out.
    """
    axes = principal_axes(keys)
    full = len(axes.mean)
    if width is None:
        needed = int((axes.shares < _ENERGY).sum()) + 1
        width = -(-needed // _STEP) * _STEP
        width = width if 2 * width <= full else full
    rotation = axes.directions[:, :width] if width < full else axes.directions[:, :0]
    # Far from the origin, products of vectors lose digits; near it, whole keys need not be shifted.
    mean = axes.mean if width < full or axes.mean @ axes.mean > axes.variance else np.zeros_like(axes.mean)
    return Space(mean, np.ascontiguousarray(rotation))


def learn_partitions(
    points: Float[np.ndarray, "n width"], space: Space, count: int, seed: int, in_parallel: Map
) -> Partitions:
    """About `count` partitions, from a sample of the keys in `space`."""
    groups = _centres(points[: 256 * round(count**0.5)], round(count**0.5), seed)
    member = faiss.knn(points, groups, 1)[1][:, 0]

    def split(group: int) -> np.ndarray:
        own = points[member == group]
        share = max(1, round(count * len(own) / len(points)))
        return _centres(own, share, seed) if len(own) else groups[group : group + 1]

    parts = in_parallel(split, range(len(groups)))
    centres = np.concatenate(parts)
    nearest = faiss.knn(centres, centres, min(NEAR, len(centres) - 1) + 1)[1]
    bounds = np.cumsum([0, *map(len, parts)])
    return Partitions(space, groups, bounds, centres, _without_itself(nearest).astype(np.int32))


def _centres(points: Float[np.ndarray, "n width"], count: int, seed: int) -> Float[np.ndarray, "count width"]:
    means = faiss.Kmeans(
        points.shape[1],
        min(count, len(points)),
        niter=8,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=256,
    )
    means.train(np.ascontiguousarray(points))
    return means.centroids


def _without_itself(nearest: Int[np.ndarray, "n k+1"]) -> Int[np.ndarray, "n k"]:
    """Each row without its own number, or without its last if that is not among them (centres that coincide)."""
    own = nearest == np.arange(len(nearest))[:, None]
    own[~own.any(1), -1] = True
    return nearest[~own].reshape(len(nearest), -1)
