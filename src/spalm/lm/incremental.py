"""Reads a text as it grows, in pieces of any length, with the hidden states that `hidden_states` gives for all of it.

Where each document is read from its own beginning, the states are the same only within the first window: later tokens
see all tokens before them instead of those of a window.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spalm.errors import InputError
from spalm.lm.interface import BatchReader, LanguageModel, Outputs
from spalm.lm.reading import Reading

_UNLIMITED = 1 << 40
"""Number of tokens that is never reached."""


class IncrementalReader:
    """Takes tokens, the start symbol first, and returns after each of them the hidden state that predicts the next.

    The text is divided into the same segments and windows as if it were read at once, so a piece that crosses from one
    into the next is read in parts.
    """

    def __init__(self, model: LanguageModel, reading: Reading, device: torch.device):
        self._model, self._reading, self._device = model, reading, device
        self._batches = model if isinstance(model, BatchReader) else None
        self.tokens: list[int] = []
        """The tokens read so far."""
        self._state: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    def feed(self, tokens: Sequence[int]) -> Float[Tensor, "n width"]:
        """Reads further tokens and returns their hidden states."""
        return self.read(tokens).hidden

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Outputs:
        """Reads further tokens and returns what the model computes for them."""
        self._refuse_if_too_long(len(tokens))
        found = []
        rest = list(tokens)
        while rest:
            piece, rest = rest[: self._tokens_left()], rest[self._tokens_left() :]
            found.append(self._read(piece))
            self.tokens += piece
        empty = Outputs(torch.zeros(0, self._model.width, device=self._device))
        return Outputs.concatenate(found) if found else empty

    @classmethod
    def read_together(
        cls, readers: "Sequence[IncrementalReader]", pieces: Sequence[Sequence[int]], needed: Sequence[int]
    ) -> list[Outputs]:
        """Reads further tokens of several texts, in one pass if the model can do that.

        Returns what the model computes for the last positions of each piece, as many as `needed` says.
        """
        model = readers[0]._batches
        if model is None:
            return [
                reader.read(piece)[len(piece) - count :]
                for reader, piece, count in zip(readers, pieces, needed, strict=True)
            ]
        for reader, piece in zip(readers, pieces, strict=True):
            reader._refuse_if_too_long(len(piece))
            if reader._state is None:
                reader._state = reader._model.empty_state(0, 0)
        found = model.read([(reader._state, piece) for reader, piece in zip(readers, pieces)], needed)
        for reader, piece in zip(readers, pieces):
            reader.tokens += piece
        return found

    @property
    def can_shorten(self) -> bool:
        """Whether the last tokens can be taken back."""
        return self._reading.by_document and getattr(self._model, "can_shorten", False)

    def shorten(self, tokens: int) -> None:
        """Takes back what follows the first `tokens` tokens."""
        self._model.shorten(self._state, tokens)  # pyright: ignore[reportAttributeAccessIssue]
        del self.tokens[tokens:]

    def copied(self) -> "IncrementalReader":
        """Returns a copy of the reader, which can be fed independently."""
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        if self._batches is not None:
            other._state = None if self._state is None else self._batches.copy_state(self._state)
        else:
            other._state = copy.deepcopy(self._state)
        return other

    def _refuse_if_too_long(self, more: int) -> None:
        """Raises an error if the text would be longer than the model can read."""
        longest = self._model.context_length
        if longest is not None and len(self) + more > longest:
            raise InputError(f"{len(self) + more:,} tokens: the model reads at most {longest:,}; give less")

    def _tokens_left(self) -> int:
        """Returns the number of tokens until the present segment or window ends; unlimited when reading by document."""
        return _UNLIMITED if self._reading.by_document else self._grid - len(self) % self._grid

    @property
    def _grid(self) -> int:
        """Number of tokens between the beginnings of two segments or windows."""
        return self._reading.segment if self._reading.memory else self._reading.stride

    def _read(self, piece: list[int]) -> Outputs:
        """Reads tokens of one segment or window, and begins it if they are its first."""
        reading = self._reading
        if self._state is None:
            self._state = self._model.empty_state(reading.memory + reading.segment, reading.segment)
        elif not reading.by_document and len(self) % self._grid == 0:
            self._begin_next()
        return self._forward(piece)

    def _begin_next(self) -> None:
        """Begins the next segment with the memory of the last, or the next window with the last tokens of this one."""
        reading = self._reading
        if reading.memory:
            for layer in self._state:
                layer.keep(reading.memory)
            return
        self._state = self._model.empty_state(reading.segment, reading.segment)
        context = reading.segment - reading.stride
        if context:
            self._forward(self.tokens[-context:])

    def _forward(self, piece: list[int]) -> Outputs:
        """Returns what the model computes for tokens that follow those of the state."""
        if self._batches is not None:
            return self._batches.read([(self._state, piece)])[0]
        return Outputs(self._model.hidden(torch.tensor([piece], device=self._device), self._state)[0])
