"""Retrieve only when it pays: from the hidden state, before any search, how much a search would gain.

The paper's own future direction. A small network predicts the gain in log-probability from h_t; a position is searched
if the prediction is above a threshold: the quantile on dev that a budget asks for. Where nothing is searched, those
neighbours of the position before that were right stand in, moved on by one: that needs no search.
"""

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from spalm.semiparametric.fitting import fit_network
from spalm.settings import Settings

_LEAST, _MOST = -2.0, 4.0
"""Gains, in nats, beyond which it does not matter how much."""

ALWAYS = -1e9
"""A threshold that every prediction is above."""


class PolicySettings(Settings):
    width: int = Field(default=64, gt=0)
    """Size of its inner layer."""
    passes: int = Field(default=8, gt=0)
    """Times that it reads the positions it learns from."""
    batch_size: int = Field(default=1024, gt=0)
    """Positions of a step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Highest learning rate; it falls along a cosine to nothing."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Rate on the hidden state that it sees."""
    seed: int = Field(default=1, ge=0)
    """Of its parameters and the order of the positions."""


class SearchPolicy(nn.Module):
    def __init__(self, settings: PolicySettings, width: int):
        super().__init__()
        self.settings = settings
        self.network = nn.Sequential(
            nn.LayerNorm(width),
            nn.Dropout(settings.dropout),
            nn.Linear(width, settings.width),
            nn.GELU(),
            nn.Linear(settings.width, 1),
        )

    def forward(self, hidden: Float[Tensor, "n width"]) -> Float[Tensor, "n"]:
        """The gain that is to be expected of a search, in nats."""
        return self.network(hidden.float())[..., 0]


def learn_policy(settings: PolicySettings, hidden: Float[Tensor, "n width"], gains: Float[Tensor, "n"]) -> SearchPolicy:
    """A policy that has learned from what searches gained at these positions."""
    torch.manual_seed(settings.seed)
    policy = SearchPolicy(settings, hidden.shape[-1])
    wanted = gains.clamp(_LEAST, _MOST)

    def loss_of(rows: Tensor) -> Tensor:
        return nn.functional.mse_loss(policy(hidden[rows]), wanted[rows])

    fit_network(policy, settings, len(gains), loss_of, torch.Generator().manual_seed(settings.seed))
    return policy


def search_threshold(predicted: Float[Tensor, "n"], share: float) -> float:
    """Above it lies that share of the predictions."""
    if share >= 1:
        return ALWAYS
    return float(torch.quantile(predicted.float(), 1 - share)) if share > 0 else -ALWAYS
