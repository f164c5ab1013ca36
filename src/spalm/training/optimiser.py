"""Adam with warm-up, decay and clipping."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from spalm.settings import Settings


class OptimiserSettings(Settings):
    learning_rate: float = Field(gt=0)
    """Highest learning rate, reached at the end of the warm-up."""
    warm_up: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from nothing."""
    decay: Literal["cosine", "inverse-sqrt", "none"] = "cosine"
    """How it falls afterwards: along a cosine to the last step, with the square root of the step, or not."""
    final_share: float = Field(default=0.05, ge=0, le=1)
    """The share of the learning rate that is left at the end of a cosine."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's average of gradients."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """Adam's average of squared gradients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay on matrices; biases and norms have none."""
    clip: float = Field(default=0.25, gt=0)
    """Gradients are scaled down to this norm."""


_TAKING_OVER = 50
"""Steps over which the learning rate rises again where training goes on with moments that are empty."""


def learning_rate(settings: OptimiserSettings, step: int, steps: int, begin: int = 0) -> float:
    """The learning rate of step number `step`, counted from 0, of `steps`, the first of which here is `begin`."""
    rate = _scheduled(settings, step, steps)
    return rate * min(1.0, (step - begin + 1) / _TAKING_OVER) if begin else rate


def _scheduled(settings: OptimiserSettings, step: int, steps: int) -> float:
    if step < settings.warm_up:
        return settings.learning_rate * (step + 1) / settings.warm_up
    if settings.decay == "inverse-sqrt":
        return settings.learning_rate * math.sqrt(max(settings.warm_up, 1) / (step + 1))
    if settings.decay == "none":
        return settings.learning_rate
    done = (step - settings.warm_up) / max(1, steps - settings.warm_up)
    share = settings.final_share + (1 - settings.final_share) * (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * share


def make_optimiser(settings: OptimiserSettings, model: nn.Module) -> torch.optim.AdamW:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2), fused=True)
