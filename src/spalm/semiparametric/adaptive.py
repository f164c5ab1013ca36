"""Beyond the paper: a mixture of probabilities whose weights depend on the position.

    p(w)     = (1 - lambda_t) p_base(w) + lambda_t p_kNN(w)
    p_kNN(w) = sum_(k: y_k = w) softmax_k(-d_k / T_t - b_t log(d_k + e) + a_t log p_base(y_k))

lambda_t, T_t, b_t and a_t come from a small network that sees the hidden state, how far the neighbours are, how far
they agree with each other and with the base, and how sure the base is. b_t is for the one neighbour that is much nearer
than all others: the same words in another place. The base is SPALM, or any language model. Normalised over the
vocabulary by construction.
"""

from dataclasses import dataclass, fields
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from spalm.semiparametric.fitting import fit_network
from spalm.semiparametric.knn import over_vocabulary
from spalm.semiparametric.retrieval import Retrieved
from spalm.settings import Settings

FORM = 2
"""Of its parameters on disk."""
_LEAST = -30.0
"""log p of retrieved tokens is not let below this."""
_TRUST, _SHARP = -1.0, -1.0
"""lambda_t begins at a sigmoid of the first, b_t at a softplus of the second."""
_NEAR = 0.01
"""e: no distance is less than this share of the usual one, or it would decide everything."""


class AdaptiveSettings(Settings):
    neighbours: int = Field(default=256, gt=0)
    """Retrieved tokens that it sees; not more than the table holds."""
    width: int = Field(default=64, gt=0)
    """Size of its two inner layers."""
    passes: int = Field(default=6, gt=0)
    """Times that it reads the positions it learns from."""
    batch_size: int = Field(default=2048, gt=0)
    """Positions of a step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Highest learning rate; it falls along a cosine to nothing."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Rate on the hidden state that it sees, and inside."""
    seed: int = Field(default=1, ge=0)
    """Of its parameters and the order of the positions."""


@dataclass(frozen=True)
class BaseOutputs:
    """What the base says at some positions."""

    hidden: Float[Tensor, "n width"]
    entropy: Float[Tensor, "n"]
    highest: Float[Tensor, "n"]
    """log p of its most likely token."""
    of_retrieved: Float[Tensor, "n count"]
    """log p of the retrieved tokens."""

    @classmethod
    def of(
        cls, hidden: Float[Tensor, "n width"], log_probabilities: Float[Tensor, "n vocabulary"], retrieved: Retrieved
    ) -> "BaseOutputs":
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return cls(
            hidden,
            entropy,
            log_probabilities.amax(-1),
            log_probabilities.gather(-1, retrieved.tokens).clamp_min(_LEAST),
        )

    @classmethod
    def room(cls, hidden: Float[Tensor, "n width"], retrieved: Retrieved) -> "BaseOutputs":
        """Of all positions, to be filled: the hidden states are known, the rest is not."""
        return cls(hidden, torch.empty(len(hidden)), torch.empty(len(hidden)), torch.empty(retrieved.tokens.shape))

    def __getitem__(self, which) -> "BaseOutputs":
        return BaseOutputs(self.hidden[which], self.entropy[which], self.highest[which], self.of_retrieved[which])

    def __setitem__(self, which, base: "BaseOutputs") -> None:
        """But for the hidden states."""
        self.entropy[which], self.highest[which] = base.entropy, base.highest
        self.of_retrieved[which] = base.of_retrieved


class AdaptiveMixture(nn.Module):
    def __init__(self, settings: AdaptiveSettings, width: int, neighbours: int):
        super().__init__()
        self.settings, self.neighbours = settings, neighbours
        self.ranks = [rank for rank in (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023) if rank < neighbours]
        seen = 3 * len(self.ranks) + 8
        self.hidden_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width + seen, settings.width),
            nn.GELU(),
            nn.Dropout(settings.dropout),
            nn.Linear(settings.width, settings.width),
            nn.GELU(),
            nn.Linear(settings.width, 4),
        )
        self.hidden_dropout = nn.Dropout(settings.dropout)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(seen))
        self.register_buffer("spread", torch.ones(seen))
        self.register_buffer("usual_distance", torch.ones(()))

    def initialise(self) -> "AdaptiveMixture":
        torch.manual_seed(self.settings.seed)
        for module in self.network:
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        nn.init.zeros_(self.network[-1].weight)
        with torch.no_grad():
            self.network[-1].bias.copy_(torch.tensor([_TRUST, 0.0, 0.0, _SHARP]))
        return self

    def learn_scales(self, base: BaseOutputs, retrieved: Retrieved) -> None:
        """Takes the scales of what it sees from a sample."""
        near = retrieved.distances[..., 0]
        self.usual_distance.fill_(near[torch.isfinite(near)].mean().clamp_min(1e-6))
        self.log_temperature.data.fill_(-2.0)
        seen = self.seen(base, retrieved)
        self.mean.copy_(seen.mean(0))
        self.spread.copy_(seen.std(0, correction=0).clamp_min(1e-3))

    def seen(self, base: BaseOutputs, retrieved: Retrieved) -> Float[Tensor, "n seen"]:
        """How the neighbours and the base look from outside."""
        tokens, there = retrieved.tokens, retrieved.there
        distances = (retrieved.distances / self.usual_distance).masked_fill(~there, 4.0).clamp_max(4.0)
        weights = torch.softmax(-8 * distances, dim=-1)
        new = _first_of_their_kind(tokens) & there
        of_retrieved = base.of_retrieved.masked_fill(~there, _LEAST)
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
        kinds = new.cumsum(-1)[..., self.ranks].float()
        return torch.cat([at_ranks, (at_ranks + _NEAR).log(), kinds, torch.stack(summary, -1)], dim=-1)

    def forward(
        self, base: BaseOutputs, retrieved: Retrieved, seen: Float[Tensor, "n seen"] | None = None
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n count"]]:
        """The logit of lambda_t, and the neighbours' weights; `seen`, if it is at hand already."""
        seen = ((self.seen(base, retrieved) if seen is None else seen) - self.mean) / self.spread
        hidden = self.hidden_dropout(self.hidden_norm(base.hidden.float()))
        weight, temperature, agreement, sharpness = self.network(torch.cat([hidden, seen], -1)).unbind(-1)
        there = retrieved.there
        distances = (retrieved.distances / self.usual_distance).masked_fill(~there, 0.0)
        scale = torch.exp(temperature.clamp(-5, 5) - self.log_temperature)[..., None]
        scores = -scale * distances + agreement[..., None] * base.of_retrieved
        scores = scores - F.softplus(sharpness)[..., None] * (distances + _NEAR).log()
        weights = torch.softmax(scores.masked_fill(~there, -1e9), dim=-1)
        return weight.masked_fill(~there.any(-1), -torch.inf), weights

    def target_log_probabilities(
        self,
        examples: "TrainingExamples",
        seen: Float[Tensor, "n seen"] | None = None,
    ) -> Float[Tensor, "n"]:
        """Returns log p of the token that came at each position."""
        weight, weights = self(examples.base, examples.retrieved, seen)
        right = (weights * (examples.retrieved.tokens == examples.targets[..., None])).sum(-1)
        return _mixed(examples.log_base, right, weight)

    def log_probabilities(
        self, log_base: Float[Tensor, "n vocabulary"], base: BaseOutputs, retrieved: Retrieved
    ) -> Float[Tensor, "n vocabulary"]:
        weight, weights = self(base, retrieved)
        return _mixed(log_base, over_vocabulary(weights, retrieved.tokens, log_base.shape[-1]), weight[..., None])


def _mixed(log_base: Float[Tensor, "*n"], other: Float[Tensor, "*n"], weight: Float[Tensor, "*n"]) -> Tensor:
    """log((1 - lambda) base + lambda other), lambda = sigmoid(weight); not the logarithm of nothing, whose gradient is
    no number, but of next to nothing."""
    log_other = other.clamp_min(1e-38).log()
    return torch.logaddexp(F.logsigmoid(-weight) + log_base, F.logsigmoid(weight).clamp_min(-1e4) + log_other)


def _first_of_their_kind(tokens: Int[Tensor, "n count"]) -> Tensor:
    """Whether no earlier neighbour has the same token."""
    order = tokens.sort(dim=-1, stable=True)
    new = F.pad(order.values[..., 1:] != order.values[..., :-1], (1, 0), value=True)
    return torch.zeros_like(new).scatter_(-1, order.indices, new)


@dataclass(frozen=True)
class TrainingExamples:
    """Positions to learn from: what the base says, what was retrieved, and what came."""

    base: BaseOutputs
    retrieved: Retrieved
    log_base: Float[Tensor, "n"]
    targets: Int[Tensor, "n"]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, which) -> "TrainingExamples":
        return TrainingExamples(self.base[which], self.retrieved[which], self.log_base[which], self.targets[which])

    def and_then(self, other: "TrainingExamples") -> "TrainingExamples":
        """Both, one after the other."""
        return TrainingExamples(
            _joined(self.base, other.base),
            _joined(self.retrieved, other.retrieved),
            torch.cat([self.log_base, other.log_base]),
            torch.cat([self.targets, other.targets]),
        )


T = TypeVar("T", BaseOutputs, Retrieved)


def _joined(one: T, other: T) -> T:
    names = [field.name for field in fields(one)]
    return type(one)(*(torch.cat([getattr(one, name), getattr(other, name)]) for name in names))


def learn_mixture(settings: AdaptiveSettings, examples: TrainingExamples) -> AdaptiveMixture:
    """A mixture that has learned from these positions; the same positions and settings give the same mixture."""
    neighbours = examples.retrieved.tokens.shape[-1]
    mixture = AdaptiveMixture(settings, examples.base.hidden.shape[-1], neighbours).initialise()
    order = torch.Generator().manual_seed(settings.seed)
    sample = examples[torch.randperm(len(examples), generator=order)[:16384]]
    mixture.learn_scales(sample.base, sample.retrieved)
    parts = (examples[rows] for rows in torch.arange(len(examples)).split(settings.batch_size))
    seen = torch.cat([mixture.seen(part.base, part.retrieved) for part in parts])  # the same in every pass

    def loss_of(rows: Tensor) -> Tensor:
        return -mixture.target_log_probabilities(examples[rows], seen[rows]).mean()

    fit_network(mixture, settings, len(examples), loss_of, order)
    return mixture


def calibrate(mixture: AdaptiveMixture, examples: TrainingExamples, steps: int = 60) -> AdaptiveMixture:
    """Fits the mixture's few general numbers (how much to trust, how sharply, how much to agree) to other positions."""
    tuned = [mixture.network[-1].bias, mixture.log_temperature]
    for parameter in tuned:
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam(tuned, 0.03)
    parts = [examples[rows] for rows in torch.arange(len(examples)).split(mixture.settings.batch_size)]
    seen = [mixture.seen(part.base, part.retrieved) for part in parts]
    for step in range(steps):
        part, known = parts[step % len(parts)], seen[step % len(parts)]
        loss = -mixture.target_log_probabilities(part, known).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return mixture.eval().requires_grad_(False)
