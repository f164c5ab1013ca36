"""Inputs of the adaptive mixture at some positions: outputs of the base, what was retrieved, and the actual token."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.semiparametric.matched import Matched
from spalm.semiparametric.retrieval import Retrieved

LEAST_LOG_P = -30.0
"""Lower bound of log p_base of retrieved tokens."""


@dataclass(frozen=True)
class BaseOutputs:
    """Outputs of the base at some positions, as far as the mixture needs them."""

    hidden: Float[Tensor, "n width"]
    """Hidden states."""
    entropy: Float[Tensor, "n"]
    """Entropy of the distribution over the vocabulary."""
    highest: Float[Tensor, "n"]
    """log p of the most likely token."""
    of_retrieved: Float[Tensor, "n count"]
    """log p of the retrieved tokens."""
    of_matched: Float[Tensor, "n levels occurrences"] | None = None
    """log p of the tokens that followed exact matches, where there are any."""

    @classmethod
    def of(
        cls, hidden: Float[Tensor, "n width"], log_probabilities: Float[Tensor, "n vocabulary"], retrieved: Retrieved
    ) -> "BaseOutputs":
        """Returns the outputs at positions with these hidden states, distributions and neighbours."""
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        of_retrieved = log_probabilities.gather(-1, retrieved.tokens).clamp_min(LEAST_LOG_P)
        of_matched = None
        if retrieved.matched is not None:
            tokens = retrieved.matched.tokens
            of_matched = log_probabilities.gather(-1, tokens.flatten(-2)).clamp_min(LEAST_LOG_P).view(tokens.shape)
        return cls(hidden, entropy, log_probabilities.amax(-1), of_retrieved, of_matched)

    @classmethod
    def allocate(cls, hidden: Float[Tensor, "n width"], retrieved: Retrieved) -> "BaseOutputs":
        """Returns outputs of all positions whose values, except for the hidden states, are still to be set."""
        of_matched = None if retrieved.matched is None else torch.empty(retrieved.matched.tokens.shape)
        numbers = torch.empty(len(hidden)), torch.empty(len(hidden)), torch.empty(retrieved.tokens.shape)
        return cls(hidden, *numbers, of_matched)

    def __getitem__(self, which) -> "BaseOutputs":
        of_matched = None if self.of_matched is None else self.of_matched[which]
        numbers = self.hidden[which], self.entropy[which], self.highest[which], self.of_retrieved[which]
        return BaseOutputs(*numbers, of_matched)

    def __setitem__(self, which, outputs: "BaseOutputs") -> None:
        """Sets everything but the hidden states."""
        self.entropy[which], self.highest[which] = outputs.entropy, outputs.highest
        self.of_retrieved[which] = outputs.of_retrieved
        if self.of_matched is not None and outputs.of_matched is not None:
            self.of_matched[which] = outputs.of_matched


@dataclass(frozen=True)
class TrainingExamples:
    """Positions to learn from, or to score: the base's outputs, the neighbours, and the actual token."""

    base: BaseOutputs
    retrieved: Retrieved
    log_base: Float[Tensor, "n"]
    """log p of the actual token under the base."""
    targets: Int[Tensor, "n"]
    """Ids of the actual tokens."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, which) -> "TrainingExamples":
        return TrainingExamples(self.base[which], self.retrieved[which], self.log_base[which], self.targets[which])

    def without_matches(self) -> "TrainingExamples":
        """Returns the examples without exact matches."""
        return replace(self, base=replace(self.base, of_matched=None), retrieved=replace(self.retrieved, matched=None))

    def without_neighbours(self) -> "TrainingExamples":
        """Returns the examples without nearest contexts."""
        base = replace(self.base, of_retrieved=self.base.of_retrieved[:, :0])
        return replace(self, base=base, retrieved=self.retrieved.nearest(0))

    def batches(self, size: int) -> "Iterator[TrainingExamples]":
        """Yields the examples in batches of `size`, in order."""
        for rows in torch.arange(len(self)).split(size):
            yield self[rows]

    def concatenate(self, other: "TrainingExamples") -> "TrainingExamples":
        """Returns these examples followed by the others."""
        return TrainingExamples(
            _concatenated(self.base, other.base),
            _concatenated(self.retrieved, other.retrieved),
            torch.cat([self.log_base, other.log_base]),
            torch.cat([self.targets, other.targets]),
        )


_OfTensors = TypeVar("_OfTensors", BaseOutputs, Retrieved, Matched)


def _concatenated(one: _OfTensors, other: _OfTensors) -> _OfTensors:
    """Returns two dataclasses of tensors, or of such dataclasses, as one, field by field."""

    def join(mine: Any, theirs: Any) -> Any:
        if mine is None:
            return None
        return torch.cat([mine, theirs]) if isinstance(mine, Tensor) else _concatenated(mine, theirs)

    return type(one)(*(join(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)))
