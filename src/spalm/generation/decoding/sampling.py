"""Picking the next token from a distribution."""

from typing import TypedDict

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from spalm.settings import Settings

_LOWEST_TEMPERATURE = 1e-30
"""Temperature below which the likeliest token has all the probability."""


class Sampling(Settings):
    """How tokens are picked, and when an answer ends."""

    max_tokens: int = Field(default=64, gt=0)
    """Number of tokens to generate at most."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature of sampling; 0 always takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the likeliest tokens that have this probability together."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many of the likeliest tokens; 0: all."""
    stop: list[str] = []
    """Texts at which the answer ends; they are not part of it."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seed of sampling; None: another one each time."""


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: list[str]
    seed: int | None


def random_generator(sampling: Sampling, device: torch.device) -> torch.Generator:
    """Returns the source of random numbers for one answer."""
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def pick_token(log_probabilities: Float[Tensor, "vocabulary"], sampling: Sampling, generator: torch.Generator) -> int:
    """Returns a token: the likeliest, or one drawn from what temperature, top_k and top_p leave."""
    if sampling.temperature == 0:
        return int(log_probabilities.numpy(force=True).argmax())  # on a CPU several times as fast as torch's
    # Relative to the likeliest token, and by no number that single precision rounds to 0: 0 / 0 is not a number.
    scores = (log_probabilities - log_probabilities.max()) / max(sampling.temperature, _LOWEST_TEMPERATURE)
    order = scores.sort(descending=True)
    if sampling.top_k:
        order.values[sampling.top_k :] = -torch.inf
    probabilities = order.values.softmax(-1)
    if sampling.top_p < 1:
        left_out = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        left_out[0] = False
        probabilities[left_out] = 0
    return int(order.indices[torch.multinomial(probabilities, 1, generator=generator)])
