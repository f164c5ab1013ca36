"""The search policy, which searches the memory only where that pays. The paper names this as a future direction.

A small network predicts from h_t the gain in log-probability that a search would bring; a position is searched if the
prediction is above a threshold, the quantile on dev that matches the wanted share of searches. Elsewhere those
neighbours of the previous position whose token was right are advanced by one entry, which needs no search.
"""

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from spalm.semiparametric.fit_network import fit_network
from spalm.settings import Seed, Settings

_LEAST, _MOST = -2.0, 4.0
"""Bounds in nats between which gains are clamped: beyond them the exact value does not matter."""

ALWAYS_SEARCH = -1e9
"""A threshold that is below every prediction."""


class PolicySettings(Settings):
    """Settings of the policy and of fitting it."""

    width: int = Field(default=64, gt=0)
    """Size of the inner layer."""
    passes: int = Field(default=8, gt=0)
    """Passes over the training positions."""
    batch_size: int = Field(default=1024, gt=0)
    """Number of positions in a training step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Highest learning rate; it falls to 0 along a cosine."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Dropout rate on the hidden state."""
    seed: Seed = 1
    """Seed of the parameters and of the order of the positions."""


class SearchPolicy(nn.Module):
    """A small network that predicts how much a search would gain."""

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
        """Returns the gain in nats that is expected of a search at each position."""
        return self.network(hidden.float())[..., 0]


def learn_policy(settings: PolicySettings, hidden: Float[Tensor, "n width"], gains: Float[Tensor, "n"]) -> SearchPolicy:
    """Returns a policy fitted to the gains of searches at these positions."""
    torch.manual_seed(settings.seed)
    policy = SearchPolicy(settings, hidden.shape[-1])
    wanted = gains.clamp(_LEAST, _MOST)

    def loss_of(rows: Tensor) -> Tensor:
        return nn.functional.mse_loss(policy(hidden[rows]), wanted[rows])

    fit_network(policy, settings, len(gains), loss_of=loss_of, order=torch.Generator().manual_seed(settings.seed))
    return policy


def search_threshold(predicted: Float[Tensor, "n"], share: float) -> float:
    """Returns the threshold above which a share of the predictions lies."""
    if share >= 1:
        return ALWAYS_SEARCH
    return float(torch.quantile(predicted.float(), 1 - share)) if share > 0 else -ALWAYS_SEARCH
