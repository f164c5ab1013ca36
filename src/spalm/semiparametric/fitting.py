"""Fitting a small network to positions that are held in memory: passes in random order, a cosine of learning rates."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn


class FitSettings(Protocol):
    passes: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int


def fit_network(
    network: nn.Module, settings: FitSettings, count: int, loss_of: Callable[[Tensor], Tensor], order: torch.Generator
) -> None:
    """Lowers the loss of `count` positions, given as a function of some of their numbers. Leaves the network frozen."""
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
    network.eval().requires_grad_(False)
