"""All ways to bring a memory in, behind one contract: hidden states and neighbours to probabilities of all tokens.

A combiner may stand on another: kNN-LM on the plain network is kNN-LM, on the gate it is SPALM + kNN.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from spalm.lm import LanguageModel
from spalm.semiparametric.adaptive import AdaptiveMixture, BaseOutputs
from spalm.semiparametric.gate import Gate
from spalm.semiparametric.knn import Knn
from spalm.semiparametric.retrieval import Retrieved


@dataclass(frozen=True)
class Combined:
    log_probabilities: Float[Tensor, "n vocabulary"]
    """Normalised over the whole vocabulary."""
    network: Float[Tensor, "n"]
    """The share of the network, the rest is the memory's: the mean of g_t, or 1 - lambda_t."""
    weights: Float[Tensor, "n count"]
    """How the memory's share is spread over the neighbours; those not looked at are left out at the end."""


class Combiner(Protocol):
    def combine(self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved) -> Combined: ...


class Plain:
    """The network alone: what every other combiner is when its memory is taken away."""

    def combine(self, model: LanguageModel, hidden: Float[Tensor, "n width"], _: Retrieved) -> Combined:
        return Combined(model.log_probabilities(hidden), hidden.new_ones(len(hidden)), hidden.new_zeros(len(hidden), 0))


@dataclass(frozen=True)
class ThroughGate:
    """SPALM."""

    gate: Gate

    def combine(self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved) -> Combined:
        mixed = self.gate(hidden, retrieved.first(self.gate.settings.neighbours), model)
        return Combined(model.log_probabilities(mixed.vectors), mixed.gate.mean(-1), mixed.attention)


@dataclass(frozen=True)
class WithKnn:
    """kNN-LM's fixed weight."""

    inner: Combiner
    knn: Knn

    def combine(self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved) -> Combined:
        return self.over(self.inner.combine(model, hidden, retrieved).log_probabilities, hidden, retrieved)

    def over(
        self, base: Float[Tensor, "n vocabulary"], hidden: Float[Tensor, "n width"], retrieved: Retrieved
    ) -> Combined:
        """The same, where the inner combiner's log-probabilities are at hand."""
        del hidden
        mixed = self.knn.log_probabilities(base, retrieved)
        return Combined(mixed, 1 - self.knn.share(retrieved), self.knn.weights(retrieved))


@dataclass(frozen=True)
class WithMixture:
    """A weight for each position."""

    inner: Combiner
    mixture: AdaptiveMixture

    def combine(self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved) -> Combined:
        return self.over(self.inner.combine(model, hidden, retrieved).log_probabilities, hidden, retrieved)

    def over(
        self, base: Float[Tensor, "n vocabulary"], hidden: Float[Tensor, "n width"], retrieved: Retrieved
    ) -> Combined:
        """The same, where the inner combiner's log-probabilities are at hand."""
        retrieved = retrieved.first(self.mixture.neighbours).padded(self.mixture.neighbours)
        outputs = BaseOutputs.of(hidden, base, retrieved)
        weight, weights = self.mixture(outputs, retrieved)
        mixed = self.mixture.log_probabilities(base, outputs, retrieved)
        return Combined(mixed, 1 - torch.sigmoid(weight), weights * retrieved.there)
