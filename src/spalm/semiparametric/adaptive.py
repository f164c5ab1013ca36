"""Beyond the paper: a mixture of probabilities whose weights depend on the position.

    p(w)     = (1 - lambda_t) p_base(w) + lambda_t p_kNN(w)
    p_kNN(w) = sum_(k: y_k = w) softmax_k(-d_k / T_t - b_t log(d_k + e) + a_t log p_base(y_k))

lambda_t, T_t, b_t and a_t come from a small network. Its inputs are the hidden state and features of the position: how
far the neighbours are, how far they agree with each other and with the base, and how sure the base is. b_t favours a
neighbour that is much nearer than all others, as where the same words stand in another place. e is a small constant.
The base is SPALM, or any language model. The mixture is normalised over the vocabulary by construction.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from spalm.semiparametric.fit_network import fit_network
from spalm.semiparametric.knn import scatter_to_vocabulary
from spalm.semiparametric.retrieval import Retrieved
from spalm.settings import Settings

PARAMETER_FORMAT = 2
"""Version of the mixture's parameters on disk."""
_LEAST_LOG_P = -30.0
"""Lower bound of log p_base of retrieved tokens."""
_INITIAL_LOGIT, _INITIAL_SHARPNESS = -1.0, -1.0
"""Initial values before the activation: lambda_t is the sigmoid of the first, b_t the softplus of the second."""
_SMALL_DISTANCE = 0.01
"""The constant e, as a share of the usual distance; without it a distance near 0 would decide everything."""
_FEATURE_RANKS = (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)
"""Ranks of the neighbours whose distances and distinct tokens are features."""


class AdaptiveSettings(Settings):
    """Settings of the adaptive mixture and of fitting it."""

    neighbours: int = Field(default=256, gt=0)
    """Number of neighbours that are mixed in, at most as many as the table holds."""
    width: int = Field(default=64, gt=0)
    """Size of the two inner layers."""
    passes: int = Field(default=6, gt=0)
    """Passes over the training positions."""
    batch_size: int = Field(default=2048, gt=0)
    """Number of positions in a training step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Highest learning rate; it falls to 0 along a cosine."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Dropout rate on the hidden state and inside the network."""
    seed: int = Field(default=1, ge=0)
    """Seed of the parameters and of the order of the positions."""


@dataclass(frozen=True)
class BaseOutputs:
    """Outputs of the base at some positions, as far as the mixture needs them."""

    hidden: Float[Tensor, "n width"]
    """Hidden states."""
    entropy: Float[Tensor, "n"]
    """Entropy of the distribution over the vocabulary."""
    highest: Float[Tensor, "n"]
    """log p of the most likely token."""
    of_retrieved: Float[Tensor, "n count"]
    """log p of the retrieved tokens."""

    @classmethod
    def of(
        cls, hidden: Float[Tensor, "n width"], log_probabilities: Float[Tensor, "n vocabulary"], retrieved: Retrieved
    ) -> "BaseOutputs":
        """Returns the outputs at positions with these hidden states, distributions and neighbours."""
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return cls(
            hidden,
            entropy,
            log_probabilities.amax(-1),
            log_probabilities.gather(-1, retrieved.tokens).clamp_min(_LEAST_LOG_P),
        )

    @classmethod
    def allocate(cls, hidden: Float[Tensor, "n width"], retrieved: Retrieved) -> "BaseOutputs":
        """Returns outputs of all positions whose values, except for the hidden states, are still to be set."""
        return cls(hidden, torch.empty(len(hidden)), torch.empty(len(hidden)), torch.empty(retrieved.tokens.shape))

    def __getitem__(self, which) -> "BaseOutputs":
        return BaseOutputs(self.hidden[which], self.entropy[which], self.highest[which], self.of_retrieved[which])

    def __setitem__(self, which, outputs: "BaseOutputs") -> None:
        """Sets everything but the hidden states."""
        self.entropy[which], self.highest[which] = outputs.entropy, outputs.highest
        self.of_retrieved[which] = outputs.of_retrieved


@dataclass(frozen=True)
class TrainingExamples:
    """Positions to learn from, or to score: the base's outputs, the neighbours, and the actual token."""

    base: BaseOutputs
    retrieved: Retrieved
    log_base: Float[Tensor, "n"]
    """log p of the actual token under the base."""
    targets: Int[Tensor, "n"]
    """Ids of the actual tokens."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, which) -> "TrainingExamples":
        return TrainingExamples(self.base[which], self.retrieved[which], self.log_base[which], self.targets[which])

    def batches(self, size: int) -> "Iterator[TrainingExamples]":
        """Yields the examples in batches of `size`, in order."""
        for rows in torch.arange(len(self)).split(size):
            yield self[rows]

    def concatenate(self, other: "TrainingExamples") -> "TrainingExamples":
        """Returns these examples followed by the others."""
        return TrainingExamples(
            _concatenated(self.base, other.base),
            _concatenated(self.retrieved, other.retrieved),
            torch.cat([self.log_base, other.log_base]),
            torch.cat([self.targets, other.targets]),
        )


_OfTensors = TypeVar("_OfTensors", BaseOutputs, Retrieved)


def _concatenated(one: _OfTensors, other: _OfTensors) -> _OfTensors:
    """Returns two dataclasses of tensors as one, field by field."""
    names = [field.name for field in fields(one)]
    return type(one)(*(torch.cat([getattr(one, name), getattr(other, name)]) for name in names))


class AdaptiveMixture(nn.Module):
    """The small network that computes lambda_t and the neighbours' weights."""

    mean: Tensor
    """Mean of the features."""
    spread: Tensor
    """Standard deviation of the features."""
    usual_distance: Tensor
    """Mean distance of the first neighbour."""

    def __init__(self, settings: AdaptiveSettings, width: int, neighbours: int):
        super().__init__()
        self.settings, self.neighbours = settings, neighbours
        self.ranks = [rank for rank in _FEATURE_RANKS if rank < neighbours]
        features = 3 * len(self.ranks) + 8
        self.hidden_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width + features, settings.width),
            nn.GELU(),
            nn.Dropout(settings.dropout),
            nn.Linear(settings.width, settings.width),
            nn.GELU(),
            nn.Linear(settings.width, 4),
        )
        self.hidden_dropout = nn.Dropout(settings.dropout)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.register_buffer("usual_distance", torch.ones(()))

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.hidden_norm.normalized_shape[0]

    @property
    def output_layer(self) -> nn.Linear:
        """The last layer. Its bias is the part of its four outputs that does not depend on the position."""
        layer = self.network[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def initialise(self) -> "AdaptiveMixture":
        """Draws the parameters at random and sets the initial bias."""
        torch.manual_seed(self.settings.seed)
        for module in self.network:
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        nn.init.zeros_(self.output_layer.weight)
        with torch.no_grad():
            self.output_layer.bias.copy_(torch.tensor([_INITIAL_LOGIT, 0.0, 0.0, _INITIAL_SHARPNESS]))
        return self

    def fit_feature_scales(self, base: BaseOutputs, retrieved: Retrieved) -> None:
        """Sets the usual distance, and the mean and spread of the features, to those of a sample."""
        near = retrieved.distances[..., 0]
        self.usual_distance.fill_(near[torch.isfinite(near)].mean().clamp_min(1e-6))
        self.log_temperature.data.fill_(-2.0)
        features = self.features(base, retrieved)
        self.mean.copy_(features.mean(0))
        self.spread.copy_(features.std(0, correction=0).clamp_min(1e-3))

    def features(self, base: BaseOutputs, retrieved: Retrieved) -> Float[Tensor, "n features"]:
        """Returns the features of some positions, not yet normalised. They depend on no learned parameter."""
        tokens, present = retrieved.tokens, retrieved.present
        distances = (retrieved.distances / self.usual_distance).masked_fill(~present, 4.0).clamp_max(4.0)
        weights = torch.softmax(-8 * distances, dim=-1)
        new = _first_occurrences(tokens) & present
        of_retrieved = base.of_retrieved.masked_fill(~present, _LEAST_LOG_P)
        probabilities = of_retrieved.exp()
        as_first = tokens == tokens[..., :1]
        summary = [
            (weights * as_first).sum(-1),
            (weights * probabilities).sum(-1),
            of_retrieved[..., 0],
            of_retrieved.amax(-1) - base.highest,
            (probabilities * new).sum(-1),
            (weights * of_retrieved).sum(-1),
            base.entropy,
            base.highest,
        ]
        at_ranks = distances[..., self.ranks]
        distinct = new.cumsum(-1)[..., self.ranks].float()
        return torch.cat([at_ranks, (at_ranks + _SMALL_DISTANCE).log(), distinct, torch.stack(summary, -1)], dim=-1)

    def forward(
        self, base: BaseOutputs, retrieved: Retrieved, features: Float[Tensor, "n features"] | None = None
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n count"]]:
        """Returns the logit of lambda_t, and the neighbours' weights; `features` saves computing them again."""
        features = self.features(base, retrieved) if features is None else features
        features = (features - self.mean) / self.spread
        hidden = self.hidden_dropout(self.hidden_norm(base.hidden.float()))
        logit, temperature, agreement, sharpness = self.network(torch.cat([hidden, features], -1)).unbind(-1)
        present = retrieved.present
        distances = (retrieved.distances / self.usual_distance).masked_fill(~present, 0.0)
        scale = torch.exp(temperature.clamp(-5, 5) - self.log_temperature)[..., None]
        scores = -scale * distances + agreement[..., None] * base.of_retrieved
        scores = scores - F.softplus(sharpness)[..., None] * (distances + _SMALL_DISTANCE).log()
        weights = torch.softmax(scores.masked_fill(~present, -1e9), dim=-1)
        return logit.masked_fill(~present.any(-1), -torch.inf), weights

    def target_log_probabilities(
        self, examples: TrainingExamples, features: Float[Tensor, "n features"] | None = None
    ) -> Float[Tensor, "n"]:
        """Returns log p of the actual token at each position."""
        logit, weights = self(examples.base, examples.retrieved, features)
        right = (weights * (examples.retrieved.tokens == examples.targets[..., None])).sum(-1)
        return _mix(examples.log_base, right, logit)

    def log_probabilities(
        self,
        log_base: Float[Tensor, "n vocabulary"],
        retrieved: Retrieved,
        logit: Float[Tensor, "n"],
        weights: Float[Tensor, "n count"],
    ) -> Float[Tensor, "n vocabulary"]:
        """Returns log p of the whole vocabulary, with the logit and the weights that `forward` returned."""
        return _mix(log_base, scatter_to_vocabulary(weights, retrieved.tokens, log_base.shape[-1]), logit[..., None])


def _mix(log_base: Float[Tensor, "..."], other: Float[Tensor, "..."], logit: Float[Tensor, "..."]) -> Tensor:
    """Returns log((1 - lambda) base + lambda other) with lambda = sigmoid(logit).

    Probabilities of 0 are replaced by a tiny one, because the gradient of log 0 is not a number.
    """
    log_other = other.clamp_min(1e-38).log()
    return torch.logaddexp(F.logsigmoid(-logit) + log_base, F.logsigmoid(logit).clamp_min(-1e4) + log_other)


def _first_occurrences(tokens: Int[Tensor, "n count"]) -> Bool[Tensor, "n count"]:
    """Returns a mask of the neighbours whose token no nearer neighbour has."""
    order = tokens.sort(dim=-1, stable=True)
    new = F.pad(order.values[..., 1:] != order.values[..., :-1], (1, 0), value=True)
    return torch.zeros_like(new).scatter_(-1, order.indices, new)


def learn_mixture(settings: AdaptiveSettings, examples: TrainingExamples) -> AdaptiveMixture:
    """Returns a mixture fitted to these positions; the same positions and settings give the same mixture."""
    neighbours = examples.retrieved.tokens.shape[-1]
    mixture = AdaptiveMixture(settings, examples.base.hidden.shape[-1], neighbours).initialise()
    order = torch.Generator().manual_seed(settings.seed)
    sample = examples[torch.randperm(len(examples), generator=order)[:16384]]
    mixture.fit_feature_scales(sample.base, sample.retrieved)
    # Computed once, as they are the same in every pass.
    features = torch.cat(
        [mixture.features(batch.base, batch.retrieved) for batch in examples.batches(settings.batch_size)]
    )

    def loss_of(rows: Tensor) -> Tensor:
        return -mixture.target_log_probabilities(examples[rows], features[rows]).mean()

    fit_network(mixture, settings, len(examples), loss_of, order)
    return mixture


def calibrate(mixture: AdaptiveMixture, examples: TrainingExamples, steps: int = 60) -> AdaptiveMixture:
    """Fits the numbers that hold for all positions (weight, temperature, agreement, sharpness) to other positions."""
    tuned = [mixture.output_layer.bias, mixture.log_temperature]
    for parameter in tuned:
        parameter.requires_grad = True
    optimiser = torch.optim.Adam(tuned, 0.03)
    batches = list(examples.batches(mixture.settings.batch_size))
    features = [mixture.features(batch.base, batch.retrieved) for batch in batches]
    for step in range(steps):
        number = step % len(batches)
        loss = -mixture.target_log_probabilities(batches[number], features[number]).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return mixture.eval().requires_grad_(requires_grad=False)
