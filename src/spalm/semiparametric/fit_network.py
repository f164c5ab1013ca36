"""Fitting a small network to positions held in memory: passes in random order, learning rates along a cosine."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn


class FitSettings(Protocol):
    """Settings that every fit needs."""

    passes: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int


def fit_network(
    network: nn.Module,
    settings: FitSettings,
    count: int,
    *,
    loss_of: Callable[[Tensor], Tensor],
    order: torch.Generator,
) -> None:
    """Minimises the loss over `count` positions and leaves the network frozen.

    `loss_of` returns the mean loss of the positions with given indices; `order` draws the order of the positions.
    """
    optimiser = torch.optim.AdamW(
        network.parameters(), settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    steps = settings.passes * -(-count // settings.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    network.train()
    for _ in range(settings.passes):
        for rows in torch.randperm(count, generator=order).split(settings.batch_size):
            optimiser.zero_grad(set_to_none=True)
            loss_of(rows).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    network.eval().requires_grad_(requires_grad=False)
