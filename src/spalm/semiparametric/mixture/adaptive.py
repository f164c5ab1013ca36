"""Adaptive mixture, beyond the paper: probabilities are mixed with weights that depend on the position.

    p(w)     = u_t p_base(w) + v_t p_kNN(w) + sum_i w_ti p_i(w)            u_t + v_t + sum_i w_ti = 1
    p_kNN(w) = sum_(k: y_k = w) softmax_k(-d_k / T_t - b_t log(d_k + e) + a_t log p_base(y_k))
    p_i(w)   = sum_(j: y_ij = w) softmax_j(c_t log p_base(y_ij))

y_k are the tokens that followed the nearest contexts, y_ij those that followed the i-th exact match. Either source may
be missing. The weights u_t, v_t, w_ti and the numbers T_t, b_t, a_t, c_t come from a small network. Its inputs are the
hidden state and features of the position: how far the neighbours are, how long the matches and how often they occur,
how far the sources agree within themselves, with each other and with the base, and how sure the base is. b_t favours a
neighbour that is much nearer than all others. e is a small constant. The base is SPALM, or any language model. The
mixture is normalised over the vocabulary by construction.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from spalm.semiparametric import matched
from spalm.semiparametric.examples import LEAST_LOG_P, BaseOutputs, TrainingExamples
from spalm.semiparametric.fit_network import fit_network
from spalm.semiparametric.knn import scatter_to_vocabulary
from spalm.semiparametric.matched import Matched
from spalm.semiparametric.retrieval import Retrieved
from spalm.settings import Seed, Settings

PARAMETER_FORMAT = 2
"""Version of the mixture's parameters on disk."""
_INITIAL_LOGIT, _INITIAL_SHARPNESS = -1.0, -1.0
"""Initial values before the activation: lambda_t is the sigmoid of the first, b_t the softplus of the second."""
SMALL_DISTANCE = 0.01
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
    seed: Seed = 1
    """Seed of the parameters and of the order of the positions."""


@dataclass(frozen=True)
class MixtureWeights:
    """Weights of the sources at some positions, and of what each of them retrieved."""

    log_sources: Float[Tensor, "n sources"]
    """Logarithms of the weights of the base, of the neighbours, and of each exact match; a weight may be 0."""
    neighbours: Float[Tensor, "n count"]
    """Weights of the neighbours among themselves."""
    matches: Float[Tensor, "n levels occurrences"] | None
    """Weights of the occurrences of each exact match among themselves; None: there are no exact matches."""

    @property
    def base_share(self) -> Float[Tensor, "n"]:
        """Weight of the base."""
        return self.log_sources[..., 0].exp()

    @property
    def log_shares_of_memory(self) -> Float[Tensor, "n sources"]:
        """Logarithms of the weights of the neighbours and of each exact match within the memory's share."""
        return self.log_sources[..., 1:].log_softmax(-1).nan_to_num(nan=-torch.inf)


class AdaptiveMixture(nn.Module):
    """The small network that weighs the base, the neighbours and the exact matches.

    `neighbours` is the number of neighbours of a position; `levels` the number of its exact matches. Either may be 0.
    """

    mean: Tensor
    """Mean of the features."""
    spread: Tensor
    """Standard deviation of the features."""
    usual_distance: Tensor
    """Mean distance of the first neighbour."""

    def __init__(self, settings: AdaptiveSettings, width: int, neighbours: int, *, levels: int = 0):
        super().__init__()
        self.settings, self.neighbours, self.levels = settings, neighbours, levels
        self.ranks = [rank for rank in _FEATURE_RANKS if rank < neighbours]
        features = (3 * len(self.ranks) + 6 if neighbours else 0) + 2
        features += levels * (matched.FEATURES + bool(neighbours))
        self.hidden_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width + features, settings.width),
            nn.GELU(),
            nn.Dropout(settings.dropout),
            nn.Linear(settings.width, settings.width),
            nn.GELU(),
            nn.Linear(settings.width, 4 + (1 + levels if levels else 0)),
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
        """The last layer. Its bias is the part of its outputs that does not depend on the position."""
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
        of_matches = [0.0, *[_INITIAL_LOGIT] * self.levels] if self.levels else []
        with torch.no_grad():
            self.output_layer.bias.copy_(torch.tensor([_INITIAL_LOGIT, 0.0, 0.0, _INITIAL_SHARPNESS, *of_matches]))
        return self

    def fit_feature_scales(self, base: BaseOutputs, retrieved: Retrieved) -> None:
        """Sets the usual distance, and the mean and spread of the features, to those of a sample."""
        if self.neighbours:
            near = retrieved.distances[..., 0]
            self.usual_distance.fill_(near[torch.isfinite(near)].mean().clamp_min(1e-6))
        self.log_temperature.data.fill_(-2.0)
        features = self.features(base, retrieved)
        self.mean.copy_(features.mean(0))
        self.spread.copy_(features.std(0, correction=0).clamp_min(1e-3))

    def features(self, base: BaseOutputs, retrieved: Retrieved) -> Float[Tensor, "n features"]:
        """Returns the features of some positions, not yet normalised. They depend on no learned parameter."""
        of_base = torch.stack([base.entropy, base.highest], -1)
        parts = [*self._of_neighbours(base, retrieved), of_base] if self.neighbours else [of_base]
        if self.levels:
            found = retrieved.matched
            assert found is not None
            assert base.of_matched is not None
            parts.append(found.features(base.of_matched, base.entropy))
            if self.neighbours:
                parts.append(self._agreement(retrieved, found))
        return torch.cat(parts, dim=-1)

    def _of_neighbours(self, base: BaseOutputs, retrieved: Retrieved) -> list[Float[Tensor, "n features"]]:
        """Returns the features of the neighbours."""
        tokens, present = retrieved.tokens, retrieved.present
        distances = (retrieved.distances / self.usual_distance).masked_fill(~present, 4.0).clamp_max(4.0)
        weights = torch.softmax(-8 * distances, dim=-1)
        new = _first_occurrences(tokens) & present
        of_retrieved = base.of_retrieved.masked_fill(~present, LEAST_LOG_P)
        probabilities = of_retrieved.exp()
        as_first = tokens == tokens[..., :1]
        summary = [
            (weights * as_first).sum(-1),
            (weights * probabilities).sum(-1),
            of_retrieved[..., 0],
            of_retrieved.amax(-1) - base.highest,
            (probabilities * new).sum(-1),
            (weights * of_retrieved).sum(-1),
        ]
        at_ranks = distances[..., self.ranks]
        distinct = new.cumsum(-1)[..., self.ranks].float()
        return [at_ranks, (at_ranks + SMALL_DISTANCE).log(), distinct, torch.stack(summary, -1)]

    def _agreement(self, retrieved: Retrieved, found: Matched) -> Float[Tensor, "n levels"]:
        """Returns the neighbours' weight on the tokens that followed each exact match, averaged over these."""
        distances = (retrieved.distances / self.usual_distance).clamp_max(4.0)
        weights = torch.softmax(-8 * distances, dim=-1) * retrieved.present
        shares = []
        for level in range(self.levels):
            tokens, present = found.tokens[..., level, :], found.present[..., level, :]
            same = (retrieved.tokens[..., :, None] == tokens[..., None, :]) & present[..., None, :]
            shares.append((same.float().mean(-1) * weights).sum(-1))
        return torch.stack(shares, -1)

    def forward(
        self, base: BaseOutputs, retrieved: Retrieved, features: Float[Tensor, "n features"] | None = None
    ) -> MixtureWeights:
        """Returns the weights of the sources and of what they retrieved; `features` saves computing them again."""
        features = self.features(base, retrieved) if features is None else features
        features = (features - self.mean) / self.spread
        hidden = self.hidden_dropout(self.hidden_norm(base.hidden.float()))
        outputs = self.network(torch.cat([hidden, features], -1))
        present = retrieved.present
        of_neighbours = outputs[..., :1].masked_fill(~present.any(-1, keepdim=True), -torch.inf)
        logits = [torch.zeros_like(of_neighbours), of_neighbours]
        matches = None
        if self.levels:
            found = retrieved.matched
            assert found is not None
            assert base.of_matched is not None
            some = found.present
            scores = (outputs[..., 4, None, None] * base.of_matched).masked_fill(~some, -1e9)
            matches = torch.softmax(scores, dim=-1) * some
            logits.append(outputs[..., 5:].masked_fill(~some.any(-1), -torch.inf))
        log_sources = torch.log_softmax(torch.cat(logits, -1), dim=-1)
        return MixtureWeights(log_sources, self._neighbour_weights(outputs, base, retrieved), matches)

    def _neighbour_weights(self, outputs: Tensor, base: BaseOutputs, retrieved: Retrieved) -> Float[Tensor, "n count"]:
        """Returns the weights of the neighbours among themselves."""
        temperature, agreement, sharpness = outputs[..., 1:4].unbind(-1)
        present = retrieved.present
        distances = (retrieved.distances / self.usual_distance).masked_fill(~present, 0.0)
        scale = torch.exp(temperature.clamp(-5, 5) - self.log_temperature)[..., None]
        scores = -scale * distances + agreement[..., None] * base.of_retrieved
        scores = scores - F.softplus(sharpness)[..., None] * (distances + SMALL_DISTANCE).log()
        return torch.softmax(scores.masked_fill(~present, -1e9), dim=-1)

    def target_log_probabilities(
        self, examples: TrainingExamples, features: Float[Tensor, "n features"] | None = None
    ) -> Float[Tensor, "n"]:
        """Returns log p of the actual token at each position."""
        retrieved, targets = examples.retrieved, examples.targets
        weights = self(examples.base, retrieved, features)
        right = [(weights.neighbours * (retrieved.tokens == targets[..., None])).sum(-1, keepdim=True)]
        if weights.matches is not None and retrieved.matched is not None:
            right.append((weights.matches * (retrieved.matched.tokens == targets[..., None, None])).sum(-1))
        return _mix(examples.log_base[..., None], torch.cat(right, -1), weights.log_sources)

    def log_probabilities(
        self, log_base: Float[Tensor, "n vocabulary"], retrieved: Retrieved, weights: MixtureWeights
    ) -> Float[Tensor, "n vocabulary"]:
        """Returns log p of the whole vocabulary, with the weights that `forward` returned."""
        shares = weights.log_sources.exp()
        tokens, added = [retrieved.tokens], [shares[..., 1:2] * weights.neighbours]
        if weights.matches is not None and retrieved.matched is not None:
            tokens.append(retrieved.matched.tokens.flatten(-2))
            added.append((shares[..., 2:, None] * weights.matches).flatten(-2))
        proposed, added = torch.cat(tokens, -1), torch.cat(added, -1)
        mixed = log_base + weights.log_sources[..., :1].clamp_min(-1e4)
        # Only few tokens were proposed by the memory; the others keep the base's share.
        memory = scatter_to_vocabulary(added, proposed, log_base.shape[-1]).gather(-1, proposed)
        known = mixed.gather(-1, proposed)
        return mixed.scatter(-1, proposed, torch.logaddexp(known, memory.clamp_min(1e-38).log()))


def _mix(log_base: Float[Tensor, "... 1"], others: Float[Tensor, "... rest"], log_weights: Tensor) -> Tensor:
    """Returns log(u base + sum_i w_i other_i), given the logarithms of u, w_1, w_2, ...

    Probabilities of 0 are replaced by a tiny one, because the gradient of log 0 is not a number.
    """
    logs = torch.cat([log_base, others.clamp_min(1e-38).log()], -1)
    return torch.logsumexp(logs + log_weights.clamp_min(-1e4), dim=-1)


def _first_occurrences(tokens: Int[Tensor, "n count"]) -> Bool[Tensor, "n count"]:
    """Returns a mask of the neighbours whose token no nearer neighbour has."""
    order = tokens.sort(dim=-1, stable=True)
    new = F.pad(order.values[..., 1:] != order.values[..., :-1], (1, 0), value=True)
    return torch.zeros_like(new).scatter_(-1, order.indices, new)


def learn_mixture(settings: AdaptiveSettings, examples: TrainingExamples) -> AdaptiveMixture:
    """Returns a mixture fitted to these positions; the same positions and settings give the same mixture."""
    neighbours = examples.retrieved.tokens.shape[-1]
    levels = 0 if examples.retrieved.matched is None else matched.LEVELS
    mixture = AdaptiveMixture(settings, examples.base.hidden.shape[-1], neighbours, levels=levels).initialise()
    order = torch.Generator().manual_seed(settings.seed)
    sample = examples[torch.randperm(len(examples), generator=order)[:16384]]
    mixture.fit_feature_scales(sample.base, sample.retrieved)
    # Computed once, as they are the same in every pass.
    features = torch.cat(
        [mixture.features(batch.base, batch.retrieved) for batch in examples.batches(settings.batch_size)]
    )

    def loss_of(rows: Tensor) -> Tensor:
        return -mixture.target_log_probabilities(examples[rows], features[rows]).mean()

    fit_network(mixture, settings, len(examples), loss_of=loss_of, order=order)
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
