"""Combiners: all ways to bring the long-term memory into a prediction, behind one contract.

A combiner takes hidden states of a network and the neighbours retrieved for the same positions, and returns
probabilities of the whole vocabulary, the network's share in them, and the weights of the neighbours. Combiners nest:
kNN-LM over the plain network is kNN-LM, over the gate it is SPALM + kNN.
"""

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from spalm.lm import LanguageModel
from spalm.semiparametric.adaptive import AdaptiveMixture
from spalm.semiparametric.examples import BaseOutputs
from spalm.semiparametric.gate import Gate
from spalm.semiparametric.knn import Knn
from spalm.semiparametric.retrieval import Retrieved


@dataclass(frozen=True)
class CombinedPrediction:
    """A prediction at some positions, and how much of it comes from the memory."""

    log_probabilities: Float[Tensor, "n vocabulary"]
    """log p of every token, normalised over the whole vocabulary."""
    network_share: Float[Tensor, "n"]
    """Share of the network, the mean of g_t or 1 - lambda_t; the rest is the memory's."""
    neighbour_weights: Float[Tensor, "n count"]
    """Weights of the neighbours within the memory's share, nearest first. There may be fewer columns than neighbours,
    as a combiner uses only the nearest ones."""


class Combiner(Protocol):
    """The contract that every way to use a memory fulfils."""

    def combine(
        self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved
    ) -> CombinedPrediction:
        """Returns the prediction at positions with these hidden states of `model` and these neighbours.

        Where nothing was retrieved, the prediction is the network's own and its share is 1.
        """
        ...


class PlainCombiner:
    """The network alone: what every other combiner becomes without a memory."""

    def combine(
        self,
        model: LanguageModel,
        hidden: Float[Tensor, "n width"],
        retrieved: Retrieved,  # noqa: ARG002
    ) -> CombinedPrediction:
        log_probabilities = model.log_probabilities(hidden)
        return CombinedPrediction(log_probabilities, hidden.new_ones(len(hidden)), hidden.new_zeros(len(hidden), 0))


@dataclass(frozen=True)
class GateCombiner:
    """SPALM: retrieved tokens enter the hidden state through the gate."""

    gate: Gate

    def combine(
        self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved
    ) -> CombinedPrediction:
        output = self.gate(hidden, retrieved.nearest(self.gate.settings.attended), model)
        return CombinedPrediction(model.log_probabilities(output.vectors), output.gate.mean(-1), output.attention)


@dataclass(frozen=True)
class KnnCombiner:
    """kNN-LM: the neighbours' distribution is mixed with another combiner's by a fixed weight."""

    inner: Combiner
    knn: Knn

    def combine(
        self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved
    ) -> CombinedPrediction:
        log_base = self.inner.combine(model, hidden, retrieved).log_probabilities
        mixed = self.knn.log_probabilities(log_base, retrieved)
        return CombinedPrediction(mixed, 1 - self.knn.share(retrieved), self.knn.weights(retrieved))


@dataclass(frozen=True)
class MixtureCombiner:
    """The adaptive mixture: as kNN-LM, with a weight that depends on the position."""

    inner: Combiner
    mixture: AdaptiveMixture

    def combine(
        self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved
    ) -> CombinedPrediction:
        log_base = self.inner.combine(model, hidden, retrieved).log_probabilities
        retrieved = retrieved.nearest(self.mixture.neighbours).padded(self.mixture.neighbours)
        weights = self.mixture(BaseOutputs.of(hidden, log_base, retrieved), retrieved)
        mixed = self.mixture.log_probabilities(log_base, retrieved, weights)
        return CombinedPrediction(mixed, weights.base_share, weights.neighbours * retrieved.present)
