"""Partitions of the keys: two levels of k-means in a space of fewer dimensions, and which partitions lie near which.

A key belongs to the partition whose centre is nearest. There are two levels of centres, groups and the partitions of
a group, so neither learning nor assigning ever compares a key with all centres. Partitions are numbered group after
group: partitions with near numbers lie near each other.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import faiss
import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.numpy import load, save
from torch import Tensor

from spalm.console import bar
from spalm.files import write_atomically
from spalm.memory import principal_axes
from spalm.neighbours.parallel import ParallelMap
from spalm.neighbours.vectors import Vectors, sample_vectors

BEAM = 3
"""Number of nearest groups with whose partitions a key is compared."""
NEAR = 256
"""Number of nearest other partitions stored for each partition: as many as a query may visit besides its own."""
POINTS = 32
"""Number of sampled keys per partition from which the centres are learned."""
_ENERGY = 0.95
"""Share of the keys' variance that the scanned dimensions must hold."""
_STEP = 32
"""Multiple to which the number of scanned dimensions is rounded up."""
_AT_ONCE = 1024
"""Keys that are projected at a time."""


@dataclass(frozen=True)
class ScanSpace:
    """The space in which keys are partitioned and scanned: their first principal axes, as many as matter."""

    mean: Float[np.ndarray, "full"]
    """Mean that is subtracted from keys; zero where that is not needed."""
    rotation: Float[np.ndarray, "full width"]
    """Orthonormal columns, so no distance in this space exceeds that of the whole keys; empty: all dimensions stay."""

    @property
    def width(self) -> int:
        """Number of dimensions."""
        return self.rotation.shape[1] or len(self.mean)

    @property
    def reduced(self) -> bool:
        """Whether the space has fewer dimensions than the keys."""
        return self.width < len(self.mean)

    @cached_property
    def _offset(self) -> Float[Tensor, "width"]:
        """Minus the mean in this space."""
        return -torch.from_numpy(self.mean) @ torch.from_numpy(self.rotation)

    def project(self, keys: Float[np.ndarray, "n full"]) -> Float[Tensor, "n width"]:
        """Returns keys in this space, in single precision."""
        vectors = torch.from_numpy(np.asarray(keys))
        if self.reduced:
            offset, rotation = self._offset, torch.from_numpy(self.rotation)
            if len(vectors) <= _AT_ONCE:
                return torch.addmm(offset, vectors.float(), rotation)
            # Few at a time: in single precision they stay in the cache.
            return torch.cat([torch.addmm(offset, part.float(), rotation) for part in vectors.split(_AT_ONCE)])
        return vectors.float() - torch.from_numpy(self.mean) if self.mean.any() else vectors.float()


@dataclass(frozen=True)
class Partitions:
    """The centres of all partitions, by groups."""

    space: ScanSpace
    """Space in which the centres lie."""
    groups: Float[np.ndarray, "groups reduced"]
    """Centres of the groups."""
    bounds: Int[np.ndarray, "groups+1"]
    """Group g has the partitions bounds[g] to bounds[g + 1] - 1."""
    centres: Float[np.ndarray, "partitions reduced"]
    """Centres of the partitions."""
    near: Int[np.ndarray, "partitions near"]
    """Numbers of the other partitions nearest to each partition, nearest first."""

    def __len__(self) -> int:
        return len(self.centres)

    @property
    def group_of_each(self) -> Int[np.ndarray, "partitions"]:
        """The group of each partition."""
        return np.repeat(np.arange(len(self.groups)), np.diff(self.bounds))

    def assign(self, vectors: Float[np.ndarray, "n width"]) -> Int[np.ndarray, "n"]:
        """Returns the nearest partition of each vector, looked for in the BEAM nearest groups."""
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
        """Writes all arrays to one safetensors file."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "space"}
        arrays = {**{field.name: getattr(self.space, field.name) for field in fields(self.space)}, **own}
        write_atomically(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))

    @classmethod
    def load(cls, path: Path) -> "Partitions":
        """Reads what `save` has written."""
        arrays = load(path.read_bytes())
        return cls(ScanSpace(arrays.pop("mean"), arrays.pop("rotation")), **arrays)


def partition_size(keys: int, neighbours: int) -> int:
    """Returns the number of keys in a partition. It grows with the memory, which limits the number of partitions.

    Where many neighbours are wanted, partitions are larger too: most of the neighbours are to be found in the first.
    """
    return max(8 * neighbours, round(384 * max(1.0, keys / 1e6) ** 0.25))


def learn_partitions(
    vectors: Vectors, count: int, seed: int, *, most_points: Callable[[int], int], parallel: ParallelMap
) -> Partitions:
    """Returns about `count` partitions of `vectors`, learned from samples of them.

    `most_points` returns the largest sample that is allowed for vectors of a given width.
    """
    with bar(f"learn {count:,} partitions", None):
        space = learn_space(sample_vectors(vectors, min(1 << 16, most_points(vectors.width)), [seed, 0]))
        points = sample_vectors(
            vectors, min(POINTS * count, most_points(space.width)), [seed, 1], transform=space.project
        )
        return partition_points(points, space, count, seed=seed, parallel=parallel)


def learn_space(keys: Float[np.ndarray, "n full"], width: int | None = None) -> ScanSpace:
    """Returns the space of the first `width` principal axes; default: as many as hold _ENERGY of the variance.

    Where that would save less than half of the work, no dimension is left out.
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
    return ScanSpace(mean, np.ascontiguousarray(rotation))


def partition_points(
    points: Float[np.ndarray, "n width"], space: ScanSpace, count: int, *, seed: int, parallel: ParallelMap
) -> Partitions:
    """Returns about `count` partitions of sampled keys, which are given in `space`."""
    groups = _centres(points[: 256 * round(count**0.5)], round(count**0.5), seed)
    member = faiss.knn(points, groups, 1)[1][:, 0]

    def split(group: int) -> np.ndarray:
        """Returns the centres of a group's partitions."""
        own = points[member == group]
        share = max(1, round(count * len(own) / len(points)))
        return _centres(own, share, seed) if len(own) else groups[group : group + 1]

    parts = parallel(split, range(len(groups)))
    centres = np.concatenate(parts)
    nearest = faiss.knn(centres, centres, min(NEAR, len(centres) - 1) + 1)[1]
    bounds = np.cumsum([0, *map(len, parts)])
    return Partitions(space, groups, bounds, centres, _without_itself(nearest).astype(np.int32))


def _centres(points: Float[np.ndarray, "n width"], count: int, seed: int) -> Float[np.ndarray, "count width"]:
    """Returns the centres that k-means finds."""
    means = faiss.Kmeans(
        points.shape[1],
        min(count, len(points)),
        niter=8,
        seed=seed % 2**31,  # faiss holds it in 32 bits
        min_points_per_centroid=1,
        max_points_per_centroid=256,
    )
    means.train(np.ascontiguousarray(points))
    assert means.centroids is not None
    return means.centroids


def _without_itself(nearest: Int[np.ndarray, "n found"]) -> Int[np.ndarray, "n near"]:
    """Returns each row without its own number, or without its last if its own is missing (centres that coincide)."""
    own = nearest == np.arange(len(nearest))[:, None]
    own[~own.any(1), -1] = True
    return nearest[~own].reshape(len(nearest), -1)
