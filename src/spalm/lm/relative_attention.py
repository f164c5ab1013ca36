"""The arithmetic of relative attention (transformer-XL, section 3.3), without parameters.

For query i of T and key j of S = M + T (M of them in the memory), the distance between them M + i - j >= 0:

    score(i, j) = content_i . k_j + position_i . r_(M+i-j)          content = q + u, position = q + v, both scaled
    output(i)   = sum_(j <= M+i) softmax_j(score(i, j)) v_j

`distances` holds r in falling order of distance: row S-1-d is r_d. Row i of `position @ distances^T` is therefore right
except for a shift of T-1-i columns. Reading that matrix with a row stride of S-1 instead of S makes the shift for free:
element (i, j) then lies at i*(S-1) + (T-1) + j = i*S + (T-1-i+j).
"""

from itertools import repeat

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Queries = Float[Tensor, "batch time heads size"]
KeysValues = Float[Tensor, "batch span 2 heads size"]
Distances = Float[Tensor, "span heads size"]

_softmax_backward = torch._softmax_backward_data  # pyright: ignore[reportPrivateImportUsage]

BLOCK = 128
"""Queries per tile: a tile's scores stay in the cache, and keys that none of its queries may see are skipped."""


def sinusoids(length: int, width: int, like: Tensor) -> Float[Tensor, "length width"]:
    """Returns the encodings R_d of the distances length-1 ... 0, in that order."""
    distance = torch.arange(length - 1, -1, -1.0, device=like.device)
    frequency = 10_000 ** -(torch.arange(0, width, 2.0, device=like.device) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width].to(like.dtype)


def attend(content: Queries, position: Queries, keys_values: KeysValues, *, distances: Distances) -> Queries:
    """Computes relative attention in the form that suits the device.

    On a CPU everything in it is in bfloat16 where autocast puts the layers around it in bfloat16.
    """
    if content.device.type != "cpu":
        return fused(content, position, keys_values, distances=distances)
    given = content, position, keys_values, distances
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return _TiledAttention.apply(*(each.bfloat16() for each in given))
    return _TiledAttention.apply(*given)


def fused(content: Queries, position: Queries, keys_values: KeysValues, *, distances: Distances) -> Queries:
    """Computes relative attention for GPUs: scaled_dot_product_attention with the shifted position term as its mask."""
    batch, time, heads, _ = content.shape
    span = keys_values.shape[1]
    by_distance = torch.einsum("bthd,shd->bhts", position, distances)
    padded = F.pad(by_distance, (1, 0)).view(batch, heads, span + 1, time)
    shifted = padded[:, :, 1:].reshape(batch, heads, time, span)
    hidden = torch.ones(time, span, dtype=torch.bool, device=content.device).triu(span - time + 1)
    mask = shifted.masked_fill(hidden, float("-inf")).to(content.dtype)
    keys, values = keys_values.unbind(2)
    query, key, value = (part.transpose(1, 2) for part in (content, keys, values))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0).transpose(1, 2)


class _TiledAttention(torch.autograd.Function):
    """Relative attention tile by tile (one lane, BLOCK queries, all heads): on a CPU about twice as fast as `fused`.

    A tile's scores are made, normalised and used while they are in the cache, and the next tile uses its buffers again.
    Inside a tile heads come first, so that each step is one batched matrix product.
    """

    @staticmethod
    def forward(ctx, content, position, keys_values, distances):  # noqa: PLR0917
        batch, time, heads, _ = content.shape
        output = torch.empty_like(content)
        kept = []
        needs_weights = any(ctx.needs_input_grad)
        for first, last, span in _tiles(time, keys_values.shape[1]):
            rows = last - first
            weights = content.new_empty(batch if needs_weights else 1, heads, rows, span)
            by_distance = content.new_empty(heads, rows, span)
            shifted = by_distance.as_strided((heads, rows, span), (rows * span, span - 1, 1), rows - 1)
            hidden = content.new_full((rows, rows - 1), float("-inf")).triu()
            reachable = distances[-span:].permute(1, 2, 0)
            lanes = zip(
                _heads_first(content[:, first:last]),
                _heads_first(position[:, first:last]),
                *(_heads_first(part[:, :span]) for part in keys_values.unbind(2)),
                weights if needs_weights else repeat(weights[0]),
                _heads_first(output[:, first:last]),
            )
            for query, place, keys, values, scores, out in lanes:
                torch.bmm(place, reachable, out=by_distance)
                torch.baddbmm(shifted, query, keys.transpose(1, 2), out=scores)
                scores[:, :, span - rows + 1 :].add_(hidden)
                torch.softmax(scores, -1, out=scores)
                out.copy_(torch.bmm(scores, values))
            kept.append(weights)
        if needs_weights:
            ctx.save_for_backward(content, position, keys_values, distances, *kept)
        return output

    @staticmethod
    def backward(ctx, gradient):
        content, position, keys_values, distances, *kept = ctx.saved_tensors
        _, time, heads, size = content.shape
        whole = keys_values.shape[1]
        d_content, d_position = torch.empty_like(content), torch.empty_like(position)
        d_keys_values = torch.empty_like(keys_values, memory_format=torch.contiguous_format)
        d_distances = content.new_zeros(heads, whole, size, dtype=torch.promote_types(content.dtype, torch.float32))
        # The last tile sees every key, so it comes first and sets the gradients that the others add to.
        for weights, (first, last, span) in reversed(list(zip(kept, _tiles(time, whole)))):
            rows = last - first
            d_scores = content.new_empty(heads, rows, span)
            # d_scores moved back by the shift. Its first rows-1 elements stay zero: nothing is shifted there.
            unshifted = content.new_zeros(heads, rows, span)
            # Column span-1 would fall on column 0 of the next row; only the last row may see that key.
            target = unshifted.as_strided((heads, rows, span - 1), (rows * span, span - 1, 1), rows - 1)
            reachable = distances[-span:].transpose(0, 1)
            put = torch.Tensor.copy_ if span == whole else torch.Tensor.add_
            lanes = zip(
                weights,
                _heads_first(gradient[:, first:last]),
                _heads_first(content[:, first:last]),
                _heads_first(position[:, first:last]),
                *(_heads_first(part[:, :span]) for part in keys_values.unbind(2)),
                _heads_first(d_content[:, first:last]),
                _heads_first(d_position[:, first:last]),
                *(_heads_first(part[:, :span]) for part in d_keys_values.unbind(2)),
            )
            for weight, upstream, query, place, keys, values, d_query, d_place, d_keys, d_values in lanes:
                put(d_values, torch.bmm(weight.transpose(1, 2), upstream))
                torch.bmm(upstream, values.transpose(1, 2), out=d_scores)
                _softmax_backward(d_scores, weight, -1, weight.dtype, grad_input=d_scores)
                put(d_keys, torch.bmm(d_scores.transpose(1, 2), query))
                d_query.copy_(torch.bmm(d_scores, keys))
                target.copy_(d_scores[:, :, :-1])
                unshifted[:, -1, -1] = d_scores[:, -1, -1]
                d_place.copy_(torch.bmm(unshifted, reachable))
                d_distances[:, -span:].add_(torch.bmm(unshifted.transpose(1, 2), place))
        return d_content, d_position, d_keys_values, d_distances.transpose(0, 1).to(distances.dtype)


def _heads_first(part: Float[Tensor, "batch length heads size"]) -> tuple[Float[Tensor, "heads length size"], ...]:
    """Returns a view of each lane with the heads as its first dimension."""
    return part.transpose(1, 2).unbind(0)


def _tiles(time: int, span: int) -> list[tuple[int, int, int]]:
    """Returns the tiles as (first query, query after the last, number of keys that the last query may see)."""
    starts = range(0, time, BLOCK)
    return [(first, min(first + BLOCK, time), span - time + min(first + BLOCK, time)) for first in starts]
