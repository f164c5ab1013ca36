"""The paper's gate (section 2.3): attention over retrieved tokens, mixed with the hidden state.

    m_t = sum_k softmax_k(y_k . q_t) y_k            y_k: vectors of the retrieved tokens, q_t = h_t
    g_t = sigmoid(w_g . h_t)
    z_t = (1 - g_t) m_t + g_t h_t                   z_t takes the place of h_t in the output layer

The paper's equation makes g_t one number, its figures show one for each dimension: `vector` is a matrix w_g, `scalar`
a vector. y_k has the scale of the network's input embeddings (times the square root of the width), which is that of
h_t; the scores of the attention are divided by it again: they are the output layer's logits of these tokens (with
adaptive softmax, those within the head or a tail).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from spalm.lm import LanguageModel
from spalm.semiparametric.retrieval import Retrieved
from spalm.settings import Settings


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

    @classmethod
    def of_paper(cls, neighbours: int) -> "GateSettings":
        """Returns the gate of the paper's equations: one number without a bias, and y_k as it stands in the table."""
        return cls(neighbours=neighbours, kind="scalar", bias=None, scaled=False)

    @property
    def attended(self) -> int:
        """K, once `neighbours` has been filled in."""
        assert self.neighbours is not None
        return self.neighbours


@dataclass(frozen=True)
class GateOutput:
    """Output of the gate, in single precision."""

    vectors: Float[Tensor, "*batch width"]
    """z_t; h_t where nothing was retrieved."""
    gate: Float[Tensor, "*batch gates"]
    """g_t; 1 where nothing was retrieved."""
    attention: Float[Tensor, "*batch count"]
    """Weights of the retrieved tokens in m_t; 0 where there is no neighbour."""


class Gate(nn.Module):
    """Computes z_t from h_t and the retrieved tokens."""

    def __init__(self, settings: GateSettings, width: int):
        super().__init__()
        self.settings, self.width = settings, width
        self.gate = nn.Linear(width, width if settings.kind == "vector" else 1, bias=settings.bias is not None)
        self.query = nn.Linear(width, width, bias=False) if settings.project_query else None
        self.memory = nn.Linear(width, width, bias=False) if settings.project_memory else None
        self.distance_weight = nn.Parameter(torch.zeros(())) if settings.distance_bias else None

    def initialise(self) -> "Gate":
        """Sets the parameters to their initial values, none of which is random."""
        nn.init.zeros_(self.gate.weight)
        if self.settings.bias is not None:
            nn.init.constant_(self.gate.bias, self.settings.bias)
        for projection in (self.query, self.memory):
            if projection is not None:
                nn.init.eye_(projection.weight)
        return self

    def forward(self, hidden: Float[Tensor, "*batch width"], retrieved: Retrieved, model: LanguageModel) -> GateOutput:
        with torch.autocast(hidden.device.type, enabled=False):
            return self._mix(hidden if hidden.dtype == torch.float64 else hidden.float(), retrieved, model)

    def _mix(self, hidden: Tensor, retrieved: Retrieved, model: LanguageModel) -> GateOutput:
        """Computes the formulas above, without autocast."""
        present = retrieved.present
        if self.training and self.settings.dropout:
            present = present & (torch.rand(present.shape, device=present.device) >= self.settings.dropout)
        gate = torch.sigmoid(self.gate(hidden))
        if not retrieved.tokens.shape[-1]:
            return GateOutput(hidden, torch.ones_like(gate), retrieved.distances)
        vectors = model.embed(retrieved.tokens)  # (*batch, K, width)
        query = hidden if self.query is None else self.query(hidden)
        scores = torch.einsum("...kd,...d->...k", vectors, query)
        if self.distance_weight is not None:
            scores = scores - self.distance_weight * retrieved.distances.masked_fill(~present, 0.0)
        # Without any neighbour the softmax is uniform, and the gate of 1 below discards it.
        weights = torch.softmax(scores.masked_fill(~present, torch.finfo(scores.dtype).min), dim=-1)
        scale = self.width**0.5 if self.settings.scaled else 1.0
        aggregated = torch.einsum("...k,...kd->...d", weights, vectors) * scale  # m_t
        if self.memory is not None:
            aggregated = self.memory(aggregated)
        gate = gate.masked_fill(~present.any(-1, keepdim=True), 1.0)
        return GateOutput(torch.lerp(aggregated, hidden, gate.expand_as(hidden)), gate, weights * present)
