"""The cross-entropy of an output layer, with the logits of a few rows in memory at a time.

The logits of one chunk of rows, not those of a batch, decide how much memory a large vocabulary needs.
"""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

_CHUNK_FLOATS = 1 << 22
"""Logits in memory at a time. More is no faster (at 8,192 tokens 512 rows are best), less is slower."""
_LOW_CHUNK_FLOATS = 1 << 20
"""The same where products are in bfloat16."""
Reduction = Literal["sum", "none"]
"""Whether cross-entropies are summed, or there is one for each row."""


class CrossEntropy(Protocol):
    """Returns the cross-entropy of softmax(hidden weight^T) and the targets."""

    def __call__(self, hidden: Tensor, weight: Tensor, target: Tensor, *, reduction: Reduction) -> Tensor: ...


def _rows_at_a_time(classes: int) -> int:
    """Returns the number of rows of a chunk, for a softmax over `classes` classes."""
    return max(64, _CHUNK_FLOATS // classes)


def _low_rows_at_a_time(classes: int) -> int:
    """Returns the same for products in bfloat16: fewer, whose logits are still in the cache when they are used."""
    return max(64, _LOW_CHUNK_FLOATS // classes)


def cross_entropy(
    hidden: Float[Tensor, "n width"],
    weight: Float[Tensor, "classes width"],
    target: Int[Tensor, "n"],
    *,
    reduction: Reduction = "sum",
) -> Tensor:
    """Returns the cross-entropy of softmax(hidden weight^T) and the targets."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=_rows_at_a_time(len(weight)))
    return F.linear_cross_entropy(hidden, weight, target, reduction=reduction, options=options)


class _SumInBfloat16(torch.autograd.Function):
    """The summed cross-entropy with its three products in bfloat16; softmax and sums are in single precision.

    Gradients are made in the forward pass, chunk by chunk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target):  # noqa: PLR0917
        low_hidden, low_weight = hidden.bfloat16(), weight.bfloat16()
        total = hidden.new_zeros(())
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for chunk in _chunks(hidden, weight):
            log_p = _log_probabilities(low_hidden[chunk], low_weight)
            total -= log_p.gather(1, target[chunk, None]).sum()
            errors = _errors(log_p, target[chunk]).bfloat16()
            d_hidden[chunk] = errors @ low_weight
            d_weight += errors.T @ low_hidden[chunk]
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx, gradient):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None


class _RowsInBfloat16(torch.autograd.Function):
    """The same with a cross-entropy for each row. The weights of the rows are known in the backward pass only, so that
    makes the softmax again."""

    @staticmethod
    def forward(ctx, hidden, weight, target):  # noqa: PLR0917
        low_hidden, low_weight = hidden.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(low_hidden, low_weight, target)
        costs = hidden.new_empty(len(hidden))
        for chunk in _chunks(hidden, weight):
            log_p = _log_probabilities(low_hidden[chunk], low_weight)
            costs[chunk] = -log_p.gather(1, target[chunk, None])[:, 0]
        return costs

    @staticmethod
    def backward(ctx, gradient):
        low_hidden, low_weight, target = ctx.saved_tensors
        d_hidden = torch.empty_like(low_hidden, dtype=torch.float32)
        d_weight = torch.zeros_like(low_weight, dtype=torch.float32)
        for chunk in _chunks(low_hidden, low_weight):
            errors = _errors(_log_probabilities(low_hidden[chunk], low_weight), target[chunk])
            errors = errors.mul_(gradient[chunk, None]).bfloat16()
            d_hidden[chunk] = errors @ low_weight
            d_weight += errors.T @ low_hidden[chunk]
        return d_hidden, d_weight, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Returns the rows whose logits are in memory at a time, where products are in bfloat16."""
    size = _low_rows_at_a_time(len(weight))
    return [slice(first, first + size) for first in range(0, len(hidden), size)]


def _log_probabilities(low_hidden: Tensor, low_weight: Tensor) -> Tensor:
    """Returns log p of every class in single precision, from logits in bfloat16."""
    return torch.log_softmax(low_hidden @ low_weight.T, -1, dtype=torch.float32)


def _errors(log_p: Tensor, target: Tensor) -> Tensor:
    """Returns the gradients of the cross-entropies by the logits; takes the place of `log_p`."""
    wanted = target[:, None]
    return log_p.exp_().scatter_add_(1, wanted, log_p.new_full(wanted.shape, -1.0))


def _in_bfloat16(hidden: Tensor, weight: Tensor, target: Tensor, *, reduction: Reduction) -> Tensor:
    """Returns the cross-entropy, with products in bfloat16."""
    function = _SumInBfloat16 if reduction == "sum" else _RowsInBfloat16
    return function.apply(hidden, weight, target)


def training_cross_entropy(device: torch.device) -> CrossEntropy:
    """Returns the cross-entropy to train with: in single precision, or as autocast says on a CPU."""
    return _in_bfloat16 if device.type == "cpu" and torch.is_autocast_enabled("cpu") else cross_entropy
