"""kNN-LM: a distribution over the retrieved tokens, mixed with a language model's by a fixed weight.

    p_kNN(w) = sum_(k: y_k = w) softmax_k(-d_k / T)            d_k: squared distances of the first k neighbours
    p(w)     = (1 - lambda) p_LM(w) + lambda p_kNN(w)

The paper's text puts lambda on p_LM; its grid, every public implementation and this one put it on p_kNN. lambda, T and
k are tuned on dev, from log-probabilities and neighbours that are on disk already.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from spalm.semiparametric.retrieval import Retrieved
from spalm.settings import Settings

Positive = Annotated[float, Field(gt=0)]


class KnnSettings(Settings):
    """The grid on which kNN-LM is tuned. The paper's grid is lambdas [0.05, 0.1, 0.2, 0.3, 0.4], counts [4]."""

    lambdas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[step / 20 for step in range(19)], min_length=1)
    """Weights of the neighbours' distribution, lambda."""
    counts: list[Annotated[int, Field(gt=0)]] = Field(default=[2**power for power in range(11)], min_length=1)
    """Numbers of neighbours, k; a number above what the table holds means all of them."""
    temperatures: list[Positive] = []
    """Temperatures, T; if empty, multiples of the first neighbours' mean distance, from a 256th of it to twice it."""

    @classmethod
    def of_paper(cls, neighbours: int) -> "KnnSettings":
        """Returns the paper's grid: five weights, one number of neighbours, no temperature."""
        return cls(lambdas=[0.05, 0.1, 0.2, 0.3, 0.4], counts=[neighbours], temperatures=[1.0])


@dataclass(frozen=True)
class Knn:
    """A tuned kNN-LM: the weight, temperature and number of the neighbours."""

    weight: float
    """Weight of the neighbours' distribution, lambda."""
    temperature: float
    """Temperature of the softmax over distances, T."""
    count: int
    """Number of neighbours, k."""

    def weights(self, retrieved: Retrieved) -> Float[Tensor, "*batch count"]:
        """Returns softmax_k(-d_k / T), 0 where there is no neighbour."""
        distances = retrieved.nearest(self.count).distances
        weights = torch.softmax(-distances / self.temperature, dim=-1)
        return torch.nan_to_num(weights)  # without any neighbour: a softmax of minus infinities

    def log_probabilities(
        self, log_probabilities: Float[Tensor, "*batch vocabulary"], retrieved: Retrieved
    ) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary, given the language model's."""
        size = log_probabilities.shape[-1]
        knn = scatter_to_vocabulary(self.weights(retrieved), retrieved.nearest(self.count).tokens, size)
        return interpolate(log_probabilities, knn.log(), self.share(retrieved)[..., None])

    def target_log_probabilities(
        self, log_probabilities: Float[Tensor, "*batch"], retrieved: Retrieved, targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Returns log p of one token at each position, from its log-probability under the language model."""
        hits = retrieved.nearest(self.count).tokens == targets[..., None]
        return interpolate(log_probabilities, (self.weights(retrieved) * hits).sum(-1).log(), self.share(retrieved))

    def share(self, retrieved: Retrieved) -> Float[Tensor, "*batch"]:
        """Returns the share of the memory: lambda where there is any neighbour, else 0."""
        return torch.where(retrieved.present.any(-1), self.weight, 0.0)


def scatter_to_vocabulary(
    weights: Float[Tensor, "*batch count"], tokens: Int[Tensor, "*batch count"], size: int
) -> Float[Tensor, "*batch vocabulary"]:
    """Returns the weights of retrieved tokens as a distribution over the vocabulary."""
    return weights.new_zeros(*weights.shape[:-1], size).scatter_add_(-1, tokens, weights)


def interpolate(
    log_base: Float[Tensor, "..."], log_other: Float[Tensor, "..."], weight: Float[Tensor, "..."]
) -> Tensor:
    """Returns log((1 - weight) base + weight other); weight, base and other may be 0. Shapes are broadcast."""
    return torch.logaddexp(torch.log1p(-weight) + log_base, torch.log(weight) + log_other)


def tune_knn(
    log_probabilities: Float[Tensor, "n"], retrieved: Retrieved, targets: Int[Tensor, "n"], *, settings: KnnSettings
) -> tuple[Knn, float]:
    """Returns the best setting of the grid on these positions, and its mean log-probability there."""
    most = retrieved.tokens.shape[-1]
    counts = sorted({min(count, most) for count in settings.counts})
    near = retrieved.distances[..., 0]
    usual = float(near[torch.isfinite(near)].mean()) if torch.isfinite(near).any() else 1.0
    temperatures = settings.temperatures or [max(usual, 1e-6) * 2.0**power for power in range(-8, 2)]
    hits = retrieved.tokens == targets[:, None]
    gaps = retrieved.distances - torch.where(torch.isfinite(near), near, 0.0)[:, None]
    some = torch.isfinite(near)
    best: tuple[Knn, float] | None = None
    for temperature in temperatures:
        weights = torch.exp(-gaps / temperature)  # relative to the weight of the nearest neighbour
        total, right = weights.cumsum(-1), (weights * hits).cumsum(-1)
        for count in counts:
            knn = torch.where(some, right[:, count - 1] / total[:, count - 1], 0.0).log()
            for weight in settings.lambdas:
                weights_here = torch.where(some, weight, 0.0)
                found = float(interpolate(log_probabilities, knn, weights_here).mean(dtype=torch.float64))
                if best is None or found > best[1]:
                    best = Knn(weight, temperature, count), found
    assert best is not None
    return best
