"""The paper's gate (section 2.3): attention over retrieved tokens, mixed with the hidden state.

    m_t = sum_k softmax_k(y_k . q_t) y_k            y_k: vectors of the retrieved tokens, q_t = h_t
    g_t = sigmoid(w_g . h_t)
    z_t = (1 - g_t) m_t + g_t h_t                   z_t takes the place of h_t in the output layer

The paper's equation makes g_t one number, its figures show one for each dimension: `vector` is a matrix w_g, `scalar`
a vector. y_k has the scale of the network's input embeddings (times the square root of the width), which is that of
h_t; the scores of the attention are divided by it again: they are the output layer's logits of these tokens (with
adaptive softmax, those within the head or a tail).

Switches, off by default, go beyond the paper:

    m_t = sum_k a_k y_k + a_0 h_t                   a = softmax of y_k . q_t e^s - d_k e^r / d, and of w_0 . h_t + b_0
    g_t = sigmoid(w_g . h_t + w_m . m_t + w_f . f_t)
    p   = (1 - c_t) softmax(z_t W) + c_t sum_k a_k 1[y_k]              c_t = sigmoid(w_c . (h_t, m_t, f_t) + b_c)

s (`learned_temperature`) and r (`scaled_distances`) are learned numbers, d_k the squared distance of a neighbour, d the
usual one of a first neighbour; a_0 is the weight of "none of them" (`allow_none`); f_t are features of the neighbours
(`sees_neighbours`); the last line is `copying`, for which the weights a_k may have numbers s and r of their own.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from spalm.lm import LanguageModel
from spalm.semiparametric.copying import CopyTerm
from spalm.semiparametric.retrieval import Retrieved
from spalm.settings import Settings, added_since

_INITIAL_SCALE = 4.0
"""Initial factor of a distance relative to the usual one in an attention score."""
_INITIAL_COPY_LOGIT = -2.0
"""Initial value of c_t before the sigmoid, which makes it 0.12."""
_FARTHEST, _SMALL_DISTANCE = 4.0, 0.01
"""Largest relative distance in the features, and what is added to one before the logarithm."""


class GateSettings(Settings):
    """Settings of the gate."""

    neighbours: int | None = Field(default=None, ge=0)
    """Number of retrieved tokens that are attended to, K; default: neighbours.count. May be changed at test."""
    kind: Literal["vector", "scalar"] = "vector"
    """One gate for each dimension, as in the paper's figures, or one for all, as in its equation."""
    bias: float | None = 2.0
    """Initial bias of the gate: sigmoid(bias) is the share of h_t. None: no bias, as in the paper's equation."""
    scaled: bool = True
    """Give the vectors of retrieved tokens the scale of the input embeddings instead of that of the shared table."""
    project_query: bool = False
    """Attend with a linear projection of h_t instead of h_t itself."""
    project_memory: bool = False
    """Pass m_t through a linear map, initially the identity: for networks whose h_t is unlike their tokens' vectors."""
    distance_bias: bool = False
    """Subtract the distance of a neighbour, times a learned weight, from its attention score."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the retrieved tokens that are dropped in training."""
    learned_temperature: bool = added_since(default=False)
    """Multiply the attention scores of h_t and the retrieved tokens by a learned number, at first 1."""
    scaled_distances: bool = added_since(default=False)
    """Subtract the distance of a neighbour, divided by the usual distance of a first neighbour and times a learned
    number, at first 4, from its attention score."""
    allow_none: bool = added_since(default=False)
    """Let the attention also give weight to none of the neighbours: that share is h_t's, or the network's."""
    sees_neighbours: bool = added_since(default=False)
    """Compute the gates also from m_t and from features of the neighbours: their distances, the entropy of the
    attention, how far their tokens agree and how likely h_t finds them."""
    copying: Literal["none", "shared", "own"] = added_since("none")
    """Give retrieved tokens a share of the probabilities too, c_t, computed from what the gate is computed from. The
    tokens divide it by the weights that they have in m_t (shared), or by weights with a temperature and a scale of the
    distances of their own (own)."""
    copy_width: int = added_since(0, ge=0)
    """Size of an inner layer between the inputs of c_t and c_t; 0: none."""

    @classmethod
    def of_paper(cls, neighbours: int) -> "GateSettings":
        """Returns the gate of the paper's equations: one number without a bias, and y_k as it stands in the table."""
        return cls(neighbours=neighbours, kind="scalar", bias=None, scaled=False)

    @property
    def attended(self) -> int:
        """K, once `neighbours` has been filled in."""
        assert self.neighbours is not None
        return self.neighbours

    @property
    def uses_usual_distance(self) -> bool:
        """Whether distances are divided by the usual distance of a first neighbour anywhere."""
        return self.scaled_distances or self.sees_neighbours or self.copying == "own"


class ExtendedGateSettings(GateSettings):
    """Settings of the gate of spalm-extended: those of the gate, with other defaults."""

    sees_neighbours: bool = True
    """As for the gate; on by default."""
    copying: Literal["none", "shared", "own"] = "own"
    """As for the gate; with weights of its own by default."""
    copy_width: int = Field(default=32, ge=0)
    """As for the gate; 32 by default."""

    def with_neighbours(self, count: int) -> GateSettings:
        """Returns them as settings of a gate, with a number of neighbours for where none is given."""
        given = count if self.neighbours is None else self.neighbours
        return GateSettings.model_validate({**self.model_dump(), "neighbours": given})


@dataclass(frozen=True)
class GateOutput:
    """Output of the gate, in single precision."""

    vectors: Float[Tensor, "*batch width"]
    """z_t; h_t where nothing was retrieved."""
    gate: Float[Tensor, "*batch gates"]
    """g_t; 1 where nothing was retrieved."""
    attention: Float[Tensor, "*batch count"]
    """Weights of the retrieved tokens in m_t; 0 where there is no neighbour."""
    copied: CopyTerm | None = None
    """Shares of the retrieved tokens in the probabilities; None: they have none, or nothing was retrieved."""

    @classmethod
    def of_network(cls, hidden: Float[Tensor, "*batch width"]) -> "GateOutput":
        """Returns the output of a network without a gate."""
        return cls(hidden, hidden.new_ones(*hidden.shape[:-1], 1), hidden.new_zeros(*hidden.shape[:-1], 0))

    def __getitem__(self, rows) -> "GateOutput":
        copied = None if self.copied is None else self.copied[rows]
        return GateOutput(self.vectors[rows], self.gate[rows], self.attention[rows], copied)

    @property
    def network_share(self) -> Float[Tensor, "*batch"]:
        """Share of the network in the prediction: the mean of g_t without copying; the rest is the memory's."""
        return 1 - self._shares_of_neighbours.sum(-1)

    @property
    def neighbour_weights(self) -> Float[Tensor, "*batch count"]:
        """Weights of the neighbours within the memory's share; 0 where nothing was retrieved."""
        shares = self._shares_of_neighbours
        if self.copied is None:
            shares = self.attention  # in the same proportion, and also where the gate is 1
        return shares / shares.sum(-1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)

    @property
    def _shares_of_neighbours(self) -> Float[Tensor, "*batch count"]:
        """Share of each neighbour in the prediction: in z_t and, where tokens are copied, in the probabilities."""
        shares = (1 - self.gate.mean(-1, keepdim=True)) * self.attention
        return shares if self.copied is None else shares * (1 - self.copied.share[..., None]) + self.copied.shares

    def log_probabilities(self, model: LanguageModel) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary."""
        of_network = model.log_probabilities(self.vectors)
        return of_network if self.copied is None else self.copied.log_probabilities(of_network)

    def target_log_probabilities(self, model: LanguageModel, targets: Int[Tensor, "*batch"]) -> Float[Tensor, "n"]:
        """Returns log p of one token at each position, all positions in one dimension."""
        of_network = model.target_log_probabilities(self.vectors.flatten(0, -2), targets.flatten())
        if self.copied is None:
            return of_network
        return self.copied.flatten().target_log_probabilities(of_network, targets.flatten())


class Gate(nn.Module):
    """Computes z_t from h_t and the retrieved tokens, and the tokens' shares of the probabilities."""

    features = 8
    """Number of features of the neighbours."""
    usual_distance: Tensor
    """Mean squared distance of a first neighbour."""

    def __init__(self, settings: GateSettings, width: int):
        super().__init__()
        self.settings, self.width = settings, width
        gates = width if settings.kind == "vector" else 1
        self.gate = nn.Linear(width, gates, bias=settings.bias is not None)
        self.query = nn.Linear(width, width, bias=False) if settings.project_query else None
        self.memory = nn.Linear(width, width, bias=False) if settings.project_memory else None
        self.distance_weight = nn.Parameter(torch.zeros(())) if settings.distance_bias else None
        # Learned numbers are arrays of one: FSDP2 cannot divide a parameter without dimensions.
        self.log_temperature = nn.Parameter(torch.zeros(1)) if settings.learned_temperature else None
        self.log_scale = nn.Parameter(torch.zeros(1)) if settings.scaled_distances else None
        self.none = nn.Linear(width, 1) if settings.allow_none else None
        seen = width + self.features if settings.sees_neighbours else 0
        self.seen = nn.Linear(seen, gates, bias=False) if seen else None
        self.copier = None if settings.copying == "none" else _copier(width + seen, settings.copy_width)
        own = settings.copying == "own"
        self.copy_log_temperature = nn.Parameter(torch.zeros(1)) if own else None
        self.copy_log_scale = nn.Parameter(torch.zeros(1)) if own else None
        if settings.uses_usual_distance:
            self.register_buffer("usual_distance", torch.ones(1))

    def initialise(self) -> "Gate":
        """Sets the parameters to their initial values, of which only those of an inner layer of c_t are random."""
        nn.init.zeros_(self.gate.weight)
        if self.settings.bias is not None:
            nn.init.constant_(self.gate.bias, self.settings.bias)
        for projection in (self.query, self.memory):
            if projection is not None:
                nn.init.eye_(projection.weight)
        if self.seen is not None:
            nn.init.zeros_(self.seen.weight)
        if self.none is not None:
            nn.init.zeros_(self.none.weight)
            nn.init.zeros_(self.none.bias)
        for scale in (self.log_scale, self.copy_log_scale):
            if scale is not None:
                nn.init.constant_(scale, math.log(_INITIAL_SCALE))
        if self.copier is not None:
            *inner, last = self.copier
            for layer in inner:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.constant_(last.bias, _INITIAL_COPY_LOGIT)
        return self

    @torch.no_grad()
    def fit_usual_distance(self, distances: Float[Tensor, "*batch count"]) -> None:
        """Sets the usual distance to the mean of the first neighbours' at some positions, if the gate needs it."""
        if self.settings.uses_usual_distance and distances.shape[-1]:
            near = distances[..., 0]
            if torch.isfinite(near).any():
                self.usual_distance.fill_(near[torch.isfinite(near)].mean().clamp_min(1e-6))

    def forward(self, hidden: Float[Tensor, "*batch width"], retrieved: Retrieved, model: LanguageModel) -> GateOutput:
        with torch.autocast(hidden.device.type, enabled=False):
            return self._mix(hidden if hidden.dtype == torch.float64 else hidden.float(), retrieved, model)

    def _mix(self, hidden: Tensor, retrieved: Retrieved, model: LanguageModel) -> GateOutput:
        """Computes the formulas above, without autocast."""
        present, count = retrieved.present, retrieved.tokens.shape[-1]
        if self.training and self.settings.dropout:
            present = present & (torch.rand(present.shape, device=present.device) >= self.settings.dropout)
        gate = self.gate(hidden)
        if not count:
            return GateOutput(hidden, torch.ones_like(gate), retrieved.distances)
        vectors = model.embed(retrieved.tokens)  # (*batch, K, width)
        query = hidden if self.query is None else self.query(hidden)
        logits = torch.einsum("...kd,...d->...k", vectors, query)
        scores = self._attention_scores(hidden, logits, retrieved, present=present)
        weights = torch.softmax(scores, dim=-1)
        scale = self.width**0.5 if self.settings.scaled else 1.0
        aggregated = torch.einsum("...k,...kd->...d", weights[..., :count], vectors) * scale  # m_t
        if self.memory is not None:
            aggregated = self.memory(aggregated)
        if self.none is not None:
            aggregated = aggregated + weights[..., count:] * hidden
        inputs = [hidden]
        if self.seen is not None:
            inputs += [aggregated, self._features(logits, weights[..., :count], retrieved, present=present)]
            gate = gate + self.seen(torch.cat(inputs[1:], -1))
        copied = None
        if self.copier is not None:
            logit = self.copier(torch.cat(inputs, -1))[..., 0]
            if self.settings.copying == "own":
                scores = self._copy_scores(logits, retrieved, present=present)
            copied = CopyTerm.of(retrieved.tokens, torch.log_softmax(scores, dim=-1), logit, present=present)
        gate = torch.sigmoid(gate).masked_fill(~present.any(-1, keepdim=True), 1.0)
        mixed = torch.lerp(aggregated, hidden, gate.expand_as(hidden))
        return GateOutput(mixed, gate, weights[..., :count] * present, copied)

    def _attention_scores(self, hidden: Tensor, logits: Tensor, retrieved: Retrieved, *, present: Tensor) -> Tensor:
        """Returns the scores of the retrieved tokens and, where it is allowed, of none of them in the last column."""
        scores = logits if self.log_temperature is None else logits * self.log_temperature.exp()
        if self.distance_weight is not None:
            scores = scores - self.distance_weight * retrieved.distances.masked_fill(~present, 0.0)
        if self.log_scale is not None:
            scores = scores - self.log_scale.exp() * self._relative_distances(retrieved, present)
        # Without any neighbour the softmax is uniform, and the gate of 1 discards it.
        scores = scores.masked_fill(~present, torch.finfo(scores.dtype).min)
        return scores if self.none is None else torch.cat([scores, self.none(hidden)], -1)

    def _copy_scores(self, logits: Tensor, retrieved: Retrieved, *, present: Tensor) -> Tensor:
        """Returns the scores by which the retrieved tokens divide c_t, where these are not those of m_t."""
        assert self.copy_log_temperature is not None
        assert self.copy_log_scale is not None
        nearness = self.copy_log_scale.exp() * self._relative_distances(retrieved, present)
        scores = logits * self.copy_log_temperature.exp() - nearness
        return scores.masked_fill(~present, torch.finfo(scores.dtype).min)

    def _relative_distances(self, retrieved: Retrieved, present: Bool[Tensor, "*batch count"]) -> Tensor:
        """Returns the distances divided by the usual one; 0 where there is no neighbour."""
        return retrieved.distances.masked_fill(~present, 0.0) / self.usual_distance

    def _features(self, logits: Tensor, weights: Tensor, retrieved: Retrieved, *, present: Tensor) -> Tensor:
        """Returns f_t; none of the features depends on the number of neighbours by its form."""
        distances = self._relative_distances(retrieved, present).masked_fill(~present, _FARTHEST).clamp_max(_FARTHEST)
        weights, there = weights * present, present.to(weights.dtype)
        nearest = distances.amin(-1)
        pairs = (retrieved.tokens[..., :, None] == retrieved.tokens[..., None, :]).to(weights.dtype)
        even = there / there.sum(-1, keepdim=True).clamp_min(1)
        features = [
            nearest,
            (nearest + _SMALL_DISTANCE).log(),
            (weights * distances).sum(-1),
            -(weights * weights.clamp_min(1e-9).log()).sum(-1),  # entropy of the attention
            torch.einsum("...j,...jk,...k->...", weights, pairs, weights),  # chance that two tokens drawn are the same
            torch.einsum("...j,...jk,...k->...", even, pairs, even),
            (weights * logits).sum(-1) / self.width**0.5,
            there.mean(-1),
        ]
        return torch.stack(features, -1)


def _copier(inputs: int, inner: int) -> nn.Sequential:
    """Returns the layers between what c_t is computed from and its value before the sigmoid."""
    if not inner:
        return nn.Sequential(nn.Linear(inputs, 1))
    return nn.Sequential(nn.Linear(inputs, inner), nn.GELU(), nn.Linear(inner, 1))
