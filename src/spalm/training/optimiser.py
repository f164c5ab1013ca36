"""Adam, or Muon for matrices and Adam for the rest, with warm-up, decay and clipping."""

import math
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from spalm.settings import Settings, added_since
from spalm.training.muon import MuonOrAdam, orthogonalised


class OptimiserSettings(Settings):
    """Settings of the optimiser and of its learning rate."""

    kind: Literal["adam", "muon"] = added_since("adam")
    """Adam, or Muon: the weights of linear layers get orthogonalised updates, all other parameters Adam's."""
    learning_rate: float = Field(gt=0)
    """Highest learning rate, reached at the end of the warm-up."""
    warm_up: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    decay: Literal["cosine", "inverse-sqrt", "none"] = "cosine"
    """Decay of the learning rate after the warm-up: a cosine, the inverse square root of the step, or none."""
    final_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the learning rate that is left at the end of a cosine."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of Adam's mean of gradients."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay rate of Adam's mean of squared gradients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay on matrices; biases and norms have none."""
    clip: float = Field(default=0.25, gt=0)
    """Largest norm of the gradient; a longer one is scaled down to it."""
    muon_momentum: float = added_since(0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum."""
    muon_iterations: int = added_since(5, ge=1, le=20)
    """Newton-Schulz iterations with which Muon orthogonalises an update."""


_SECOND_WARM_UP = 50
"""Steps over which the learning rate rises again if training continues from another model, with empty moments."""


def learning_rate(settings: OptimiserSettings, step: int, steps: int, *, first_step: int = 0) -> float:
    """Returns the learning rate of step `step` (from 0) of `steps`; `first_step` is where training begins."""
    rate = _scheduled(settings, step, steps)
    return rate * min(1.0, (step - first_step + 1) / _SECOND_WARM_UP) if first_step else rate


def _scheduled(settings: OptimiserSettings, step: int, steps: int) -> float:
    """Returns the learning rate that warm-up and decay give at a step."""
    if step < settings.warm_up:
        return settings.learning_rate * (step + 1) / settings.warm_up
    if settings.decay == "inverse-sqrt":
        return settings.learning_rate * math.sqrt(max(settings.warm_up, 1) / (step + 1))
    if settings.decay == "none":
        return settings.learning_rate
    done = (step - settings.warm_up) / max(1, steps - settings.warm_up)
    share = settings.final_share + (1 - settings.final_share) * (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * share


def make_optimiser(
    settings: OptimiserSettings, model: nn.Module, *, bf16: bool = False, threads: int = 1
) -> torch.optim.AdamW:
    """Makes the optimiser of a model's parameters; matrices alone have weight decay.

    Muon makes its updates in bfloat16 if the network is trained in it (`bf16`), and shares the matrices among threads.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = settings.beta1, settings.beta2
    if settings.kind == "adam":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return MuonOrAdam(
        groups,
        linear,
        betas=betas,
        momentum=settings.muon_momentum,
        orthogonalise=partial(orthogonalised, iterations=settings.muon_iterations, bf16=bf16),
        threads=threads,
    )
