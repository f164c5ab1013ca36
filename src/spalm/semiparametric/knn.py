"""kNN-LM: a distribution over the retrieved tokens, mixed with a language model's by a fixed weight.

    p_kNN(w) = sum_(k: y_k = w) softmax_k(-d_k / T)            d_k: squared distances of the first k neighbours
    p(w)     = (1 - lambda) p_LM(w) + lambda p_kNN(w)

The paper's text puts lambda on p_LM, its grid and every public code on p_kNN: so do we. lambda, T and k are tuned on
dev, from log-probabilities and neighbours that are on disk already.
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
    """The grid on which kNN-LM is tuned. The paper's: lambdas [0.05, 0.1, 0.2, 0.3, 0.4], counts [4]."""

    lambdas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[step / 20 for step in range(19)], min_length=1)
    """Weights of the neighbours."""
    counts: list[Annotated[int, Field(gt=0)]] = Field(default=[2**power for power in range(11)], min_length=1)
    """Numbers of neighbours: k; more than the table holds count as all of them."""
    temperatures: list[Positive] = []
    """T; empty: multiples of the first neighbours' mean distance, from a 256th of it to twice it."""


@dataclass(frozen=True)
class Knn:
    """How much the neighbours count."""

    weight: float
    """lambda."""
    temperature: float
    count: int

    def weights(self, retrieved: Retrieved) -> Float[Tensor, "*batch count"]:
        """softmax_k(-d_k / T), zero where there is no neighbour."""
        distances = retrieved.first(self.count).distances
        weights = torch.softmax(-distances / self.temperature, dim=-1)
        return torch.nan_to_num(weights)  # nothing retrieved at all: a softmax of minus infinities

    def log_probabilities(
        self, log_probabilities: Float[Tensor, "*batch vocabulary"], retrieved: Retrieved
    ) -> Float[Tensor, "*batch vocabulary"]:
        """Of the mixture, over the whole vocabulary."""
        knn = over_vocabulary(self.weights(retrieved), retrieved.first(self.count).tokens, log_probabilities.shape[-1])
        return mix(log_probabilities, knn.log(), self.share(retrieved)[..., None])

    def target_log_probabilities(
        self, log_probabilities: Float[Tensor, "*batch"], retrieved: Retrieved, targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Of one token a position, from its log-probability under the language model."""
        hits = retrieved.first(self.count).tokens == targets[..., None]
        return mix(log_probabilities, (self.weights(retrieved) * hits).sum(-1).log(), self.share(retrieved))

    def share(self, retrieved: Retrieved) -> Float[Tensor, "*batch"]:
        """lambda where there is a neighbour at all, else nothing."""
        return torch.where(retrieved.there.any(-1), self.weight, 0.0)


def over_vocabulary(
    weights: Float[Tensor, "*batch count"], tokens: Int[Tensor, "*batch count"], size: int
) -> Float[Tensor, "*batch vocabulary"]:
    """Weights of retrieved tokens as a distribution over all tokens."""
    return weights.new_zeros(*weights.shape[:-1], size).scatter_add_(-1, tokens, weights)


def mix(
    log_base: Float[Tensor, "*n"], log_other: Float[Tensor, "*n"], weight: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """log((1 - weight) base + weight other), whichever of them is nothing."""
    return torch.logaddexp(torch.log1p(-weight) + log_base, torch.log(weight) + log_other)


def tune_knn(
    log_probabilities: Float[Tensor, "n"], retrieved: Retrieved, targets: Int[Tensor, "n"], settings: KnnSettings
) -> tuple[Knn, float]:
    """The best of the grid on these positions, and its mean log-probability there."""
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
        weights = torch.exp(-gaps / temperature)  # of the nearest 1
        total, right = weights.cumsum(-1), (weights * hits).cumsum(-1)
        for count in counts:
            knn = torch.where(some, right[:, count - 1] / total[:, count - 1], 0.0).log()
            for weight in settings.lambdas:
                weights_here = torch.where(some, weight, 0.0)
                found = float(mix(log_probabilities, knn, weights_here).mean(dtype=torch.float64))
                if best is None or found > best[1]:
                    best = Knn(weight, temperature, count), found
    assert best is not None
    return best
