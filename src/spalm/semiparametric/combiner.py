"""Combiners: all ways to bring the long-term memory into a prediction, behind one contract.

A combiner takes hidden states of a network and what was retrieved for the same positions, and returns probabilities of
the whole vocabulary, the network's share in them, and the weights of what was retrieved. Combiners nest: kNN-LM over
the plain network is kNN-LM, over the gate it is SPALM + kNN.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from spalm.lm import LanguageModel
from spalm.semiparametric.examples import BaseOutputs
from spalm.semiparametric.gate import Gate
from spalm.semiparametric.knn import Knn
from spalm.semiparametric.matched import Matched
from spalm.semiparametric.mixture.adaptive import AdaptiveMixture
from spalm.semiparametric.mixture.few_positions import MOST_POSITIONS, CompiledMixture
from spalm.semiparametric.retrieval import Retrieved

Logits = Float[Tensor, "n vocabulary"] | None


@dataclass(frozen=True)
class CombinedPrediction:
    """A prediction at some positions, and how much of it comes from the memory."""

    log_probabilities: Float[Tensor, "n vocabulary"]
    """log p of every token, normalised over the whole vocabulary."""
    network_share: Float[Tensor, "n"]
    """Share of the network: the mean of g_t, times 1 - c_t where tokens are copied, or 1 - lambda_t; the rest is the
    memory's."""
    neighbour_weights: Float[Tensor, "n count"]
    """Weights of the neighbours within the memory's share, nearest first. There may be fewer columns than neighbours,
    as a combiner uses only the nearest ones."""
    match_weights: Float[Tensor, "n levels occurrences"] | None = None
    """Weights of the occurrences of exact matches within the memory's share, where the combiner uses them."""

    def __getitem__(self, rows: slice) -> "CombinedPrediction":
        return CombinedPrediction(
            self.log_probabilities[rows],
            self.network_share[rows],
            self.neighbour_weights[rows],
            None if self.match_weights is None else self.match_weights[rows],
        )

    def weight_of(self, token: int, retrieved: Retrieved) -> float:
        """Returns the weight that a token has within the memory's share at the first position."""
        columns = [(self.neighbour_weights, retrieved.tokens)]
        if self.match_weights is not None and retrieved.matched is not None:
            columns.append((self.match_weights, retrieved.matched.tokens))
        weight = 0.0
        for each in columns:  # by numpy: for one position an operation of torch takes longer than all of this
            weights, tokens = (column[0].numpy(force=True).reshape(-1) for column in each)
            count = min(len(weights), len(tokens))
            weight += float(weights[:count][tokens[:count] == token].sum())
        return weight

    def proposals(self, retrieved: Retrieved) -> list[tuple[int, int, float]]:
        """Returns (id, token, weight) of each retrieved entry that has a weight at the first position.

        An entry that is both a neighbour and an occurrence of an exact match has its whole weight.
        """
        count = min(self.neighbour_weights.shape[1], retrieved.ids.shape[1])
        found = [(retrieved.ids[0, :count], retrieved.tokens[0, :count], self.neighbour_weights[0, :count])]
        if self.match_weights is not None and retrieved.matched is not None:
            found.append((retrieved.matched.ids[0], retrieved.matched.tokens[0], self.match_weights[0]))
        tokens, weights = dict[int, int](), defaultdict[int, float](float)
        for columns in found:
            for id, token, weight in zip(*(column.flatten().tolist() for column in columns)):
                if weight > 0:
                    tokens[id] = token
                    weights[id] += weight
        return [(id, token, weights[id]) for id, token in tokens.items()]


class Combiner(Protocol):
    """The contract that every way to use a memory fulfils."""

    @property
    def uses_neighbours(self) -> bool:
        """Whether nearest contexts take part in the prediction."""
        ...

    @property
    def uses_matches(self) -> bool:
        """Whether exact matches take part in the prediction."""
        ...

    def combine(
        self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved, *, logits: Logits = None
    ) -> CombinedPrediction:
        """Returns the prediction at positions with these hidden states of `model` and these neighbours.

        `logits` are the network's own at these positions, if they are known: then they are not computed again. Where
        nothing was retrieved, the prediction is the network's own and its share is 1.
        """
        ...


class PlainCombiner:
    """The network alone: what every other combiner becomes without a memory."""

    uses_neighbours = uses_matches = False

    def combine(
        self,
        model: LanguageModel,
        hidden: Float[Tensor, "n width"],
        retrieved: Retrieved,  # noqa: ARG002
        *,
        logits: Logits = None,
    ) -> CombinedPrediction:
        log_probabilities = model.log_probabilities(hidden) if logits is None else logits.log_softmax(-1)
        return CombinedPrediction(log_probabilities, hidden.new_ones(len(hidden)), hidden.new_zeros(len(hidden), 0))


@dataclass(frozen=True)
class GateCombiner:
    """SPALM: retrieved tokens enter the hidden state through the gate, and the probabilities where the gate copies."""

    gate: Gate
    uses_neighbours, uses_matches = True, False

    def combine(
        self,
        model: LanguageModel,
        hidden: Float[Tensor, "n width"],
        retrieved: Retrieved,
        *,
        logits: Logits = None,  # noqa: ARG002 - those without the gate
    ) -> CombinedPrediction:
        output = self.gate(hidden, retrieved.nearest(self.gate.settings.attended), model)
        return CombinedPrediction(output.log_probabilities(model), output.network_share, output.neighbour_weights)


@dataclass(frozen=True)
class KnnCombiner:
    """kNN-LM: the neighbours' distribution is mixed with another combiner's by a fixed weight."""

    inner: Combiner
    knn: Knn
    uses_neighbours, uses_matches = True, False

    def combine(
        self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved, *, logits: Logits = None
    ) -> CombinedPrediction:
        log_base = self.inner.combine(model, hidden, retrieved, logits=logits).log_probabilities
        mixed = self.knn.log_probabilities(log_base, retrieved)
        return CombinedPrediction(mixed, 1 - self.knn.share(retrieved), self.knn.weights(retrieved))


@dataclass(frozen=True)
class MixtureCombiner:
    """The adaptive mixture of another combiner with nearest contexts, exact matches or both."""

    inner: Combiner
    mixture: AdaptiveMixture

    @property
    def uses_neighbours(self) -> bool:
        return self.mixture.neighbours > 0 or self.inner.uses_neighbours

    @property
    def uses_matches(self) -> bool:
        return self.mixture.levels > 0

    @cached_property
    def _compiled(self) -> CompiledMixture:
        return CompiledMixture(self.mixture)

    def combine(
        self, model: LanguageModel, hidden: Float[Tensor, "n width"], retrieved: Retrieved, *, logits: Logits = None
    ) -> CombinedPrediction:
        few = len(hidden) <= MOST_POSITIONS and hidden.device.type == "cpu" and not torch.is_grad_enabled()
        if few and logits is not None and isinstance(self.inner, PlainCombiner):
            scores = logits  # the compiled mixture normalises them itself
        else:
            scores = self.inner.combine(model, hidden, retrieved, logits=logits).log_probabilities
        retrieved = retrieved.nearest(self.mixture.neighbours).padded(self.mixture.neighbours)
        if self.uses_matches and retrieved.matched is None:
            retrieved = replace(retrieved, matched=Matched.nothing(len(hidden)).to(hidden.device))
        if few:
            return CombinedPrediction(*self._compiled(hidden, scores, retrieved))
        weights = self.mixture(BaseOutputs.of(hidden, scores, retrieved), retrieved)
        mixed = self.mixture.log_probabilities(scores, retrieved, weights)
        shares = weights.log_shares_of_memory.exp()
        neighbours = shares[..., :1] * weights.neighbours * retrieved.present
        matches = None if weights.matches is None else shares[..., 1:, None] * weights.matches
        return CombinedPrediction(mixed, weights.base_share, neighbours, matches)
