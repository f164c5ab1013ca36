"""The short-term memory that a model carries from call to call: keys and values at test time, inputs in training."""

import torch
from jaxtyping import Float
from torch import Tensor


class LayerState:
    """One layer's memory at test time: the keys and values of the last tokens, and the projected distances.

    Weights do not change at test time, so keys and values are kept instead of the hidden states that they come from.
    The result is the same, and a step of one token computes only that token. They are in a buffer with room to append;
    when it is full, they are moved to the beginning of a new one.
    """

    def __init__(self, distances: Float[Tensor, "reach heads size"], memory_length: int):
        self._distances = distances
        self._memory_length = memory_length
        self._buffer: Tensor | None = None
        self._first = self._last = 0

    def append(
        self, keys_values: Float[Tensor, "batch time 2 heads size"]
    ) -> tuple[Float[Tensor, "batch span 2 heads size"], Float[Tensor, "span heads size"]]:
        """Appends new tokens' keys and values; returns those of memory and new tokens, and the projected distances."""
        time = keys_values.shape[1]
        self.keep(self._memory_length)
        buffer = self._buffer
        if buffer is None or self._last + time > buffer.shape[1]:
            buffer = self._make_room(keys_values)
        buffer[:, self._last : self._last + time] = keys_values
        self._last += time
        span = self._last - self._first
        if span > len(self._distances):
            raise ValueError(f"{span} tokens in reach, the state was made for {len(self._distances)}")
        return buffer[:, self._first : self._last], self._distances[-span:]

    def keep(self, count: int) -> None:
        """Forgets all but the last `count` tokens."""
        self._first = max(self._first, self._last - count)

    def _make_room(self, keys_values: Tensor) -> Tensor:
        """Moves the remembered tokens to the beginning of a new buffer, and returns the buffer."""
        batch, time, *rest = keys_values.shape
        held = self._last - self._first
        capacity = 2 * self._memory_length + time
        buffer = keys_values.new_empty(batch, capacity, *rest)
        if held and self._buffer is not None:
            buffer[:, :held] = self._buffer[:, self._first : self._last]
        self._buffer, self._first, self._last = buffer, 0, held
        return buffer


State = list[LayerState]
"""A model's short-term memory while it reads a stream, layer by layer. Reading appends to it, in place."""


def next_memory(
    memory: list[Tensor] | None, layer_inputs: list[Tensor], memory_length: int
) -> list[Float[Tensor, "batch memory width"]]:
    """Returns the short-term memory of training after a segment: the last M inputs of every layer, without gradient."""
    if memory_length == 0:
        return []
    older = memory or [new.detach()[:, :0] for new in layer_inputs]
    return [torch.cat([old, new.detach()], dim=1)[:, -memory_length:] for old, new in zip(older, layer_inputs)]
