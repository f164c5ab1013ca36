"""Principal axes: fewer numbers for a vector, chosen so that distances change as little as possible."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Axes:
    mean: Float[np.ndarray, "full"]
    directions: Float[np.ndarray, "full full"]
    """Orthonormal columns, by falling variance."""
    shares: Float[np.ndarray, "full"]
    """Share of all variance in the first so many directions."""
    variance: float
    """All of it."""


def principal_axes(sample: Float[np.ndarray, "n full"]) -> Axes:
    points = torch.from_numpy(np.asarray(sample)).float()
    mean = points.mean(0)
    centred = points - mean
    variances, directions = torch.linalg.eigh((centred.T @ centred).double() / len(points))
    variances = variances.flip(0).clamp_min(0)
    shares = variances.cumsum(0) / variances.sum().clamp_min(1e-30)
    directions = directions.flip(1).float().contiguous()
    return Axes(mean.numpy(), directions.numpy(), shares.numpy(), float(variances.sum()))


@dataclass(frozen=True)
class Projection:
    """k = (h - mean) directions."""

    mean: Float[np.ndarray, "full"]
    directions: Float[np.ndarray, "full width"]

    @classmethod
    def learn(cls, sample: Float[np.ndarray, "n full"], width: int) -> "Projection":
        axes = principal_axes(sample)
        return cls(axes.mean, np.ascontiguousarray(axes.directions[:, :width]))

    def __call__(self, vectors: Float[Tensor, "*n full"]) -> Float[Tensor, "*n width"]:
        mean, directions = (torch.from_numpy(array).to(vectors.device) for array in (self.mean, self.directions))
        return (vectors.float() - mean) @ directions
