"""Principal axes: vectors in fewer dimensions, chosen so that distances change as little as possible."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spalm.errors import InputError


@dataclass(frozen=True)
class PrincipalAxes:
    """The principal axes of a sample of vectors."""

    mean: Float[np.ndarray, "full"]
    """Mean of the sample."""
    directions: Float[np.ndarray, "full full"]
    """Orthonormal directions as columns, by falling variance."""
    shares: Float[np.ndarray, "full"]
    """Share of the variance in the first 1, 2, ... directions."""
    variance: float
    """Variance in all directions."""


def principal_axes(sample: Float[np.ndarray, "n full"]) -> PrincipalAxes:
    """Returns the principal axes of a sample."""
    points = torch.from_numpy(np.asarray(sample)).float()
    mean = points.mean(0)
    centred = points - mean
    variances, directions = torch.linalg.eigh((centred.T @ centred).double() / len(points))
    variances = variances.flip(0).clamp_min(0)
    shares = variances.cumsum(0) / variances.sum().clamp_min(1e-30)
    directions = directions.flip(1).float().contiguous()
    return PrincipalAxes(mean.numpy(), directions.numpy(), shares.numpy(), float(variances.sum()))


@dataclass(frozen=True)
class Projection:
    """Projection of a hidden state h to a key: k = (h - mean) directions."""

    mean: Float[np.ndarray, "full"]
    """Mean of the vectors it was learned from."""
    directions: Float[np.ndarray, "full width"]
    """The first principal directions, as columns."""

    @classmethod
    def learn(cls, sample: Float[np.ndarray, "n full"], width: int) -> "Projection":
        """Returns the projection to the first `width` principal axes of a sample."""
        axes = principal_axes(sample)
        return cls(axes.mean, np.ascontiguousarray(axes.directions[:, :width]))

    def __call__(self, vectors: Float[Tensor, "*n full"]) -> Float[Tensor, "*n width"]:
        mean, directions = (torch.from_numpy(array).to(vectors.device) for array in (self.mean, self.directions))
        return (vectors.float() - mean) @ directions


def to_half_precision(vectors: Float[Tensor, "n width"]) -> Float[np.ndarray, "n width"]:
    """Returns vectors in half precision; refuses what does not fit, instead of storing infinity."""
    with np.errstate(over="ignore"):
        keys = vectors.detach().cpu().float().numpy().astype(np.float16)
    if not np.isfinite(keys).all():
        raise InputError("a hidden state does not fit float16; take a model that normalises its output")
    return keys
