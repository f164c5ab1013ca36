"""The cross-entropy of an output layer, with the logits of a few rows in memory at a time.

The logits of one chunk of rows, not those of a batch, decide how much memory a large vocabulary needs.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

_CHUNK_FLOATS = 1 << 22
"""Logits in memory at a time. More is no faster (at 8,192 tokens 512 rows are best), less is slower."""
_LOW_CHUNK_FLOATS = 1 << 20
"""The same where products are in bfloat16."""
SummedCrossEntropy = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the summed cross-entropy of hidden states, the classes' vectors and the targets."""


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
    reduction: Literal["sum", "none"] = "sum",
) -> Tensor:
    """Returns the cross-entropy of softmax(hidden weight^T) and the targets."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=_rows_at_a_time(len(weight)))
    return F.linear_cross_entropy(hidden, weight, target, reduction=reduction, options=options)


class _CrossEntropyInBfloat16(torch.autograd.Function):
    """The summed cross-entropy with its three products in bfloat16; softmax and sums are in single precision.

    Gradients are made in the forward pass, chunk by chunk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target):  # noqa: PLR0917
        low_hidden, low_weight = hidden.bfloat16(), weight.bfloat16()
        total = hidden.new_zeros(())
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        size = _low_rows_at_a_time(len(weight))
        for first in range(0, len(hidden), size):
            chunk = slice(first, first + size)
            wanted = target[chunk, None]
            log_p = torch.log_softmax(low_hidden[chunk] @ low_weight.T, -1, dtype=torch.float32)
            total -= log_p.gather(1, wanted).sum()
            errors = log_p.exp_().scatter_add_(1, wanted, log_p.new_full(wanted.shape, -1.0)).bfloat16()
            d_hidden[chunk] = errors @ low_weight
            d_weight += errors.T @ low_hidden[chunk]
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx, gradient):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None


def _in_bfloat16(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Returns the summed cross-entropy, with products in bfloat16."""
    return _CrossEntropyInBfloat16.apply(hidden, weight, target)


def training_cross_entropy(device: torch.device) -> SummedCrossEntropy:
    """Returns the cross-entropy to train with: in single precision, or as autocast says on a CPU."""
    return _in_bfloat16 if device.type == "cpu" and torch.is_autocast_enabled("cpu") else cross_entropy
