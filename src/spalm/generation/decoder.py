"""Decoding: tokens in, the distribution of the next token out, with the memory searched at most once a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spalm.lm import IncrementalReader
from spalm.memory.exact import BORDER, LONGEST, last_contexts
from spalm.semiparametric import CombinedPrediction, Retrieved, advance_neighbours

if TYPE_CHECKING:
    from spalm.generation.model import Model

_ROWS = 64
"""Positions that are predicted together."""


@dataclass(frozen=True)
class EncodedTokens:
    """Hidden states and keys after each token that was read."""

    hidden: Tensor
    """Hidden states, from which the next token is predicted."""
    keys: np.ndarray
    """Keys with which the memory is searched for nearest contexts; without columns if it is not."""
    contexts: np.ndarray
    """The last tokens read, with which the memory is searched for exact matches (see `reversed_contexts`)."""

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, rows) -> "EncodedTokens":
        return EncodedTokens(self.hidden[rows], self.keys[rows], self.contexts[rows])

    @classmethod
    def concatenate(cls, parts: "list[EncodedTokens]") -> "EncodedTokens":
        """Returns several groups of positions as one."""
        hidden = torch.cat([part.hidden for part in parts])
        return cls(hidden, *(np.concatenate([getattr(part, name) for part in parts]) for name in ("keys", "contexts")))


class Decoder:
    """Reads a growing text and predicts its next token, with the memory or without it."""

    def __init__(self, model: "Model", *, use_memory: bool = True):
        self.model, self.use_memory = model, use_memory
        self._reader = IncrementalReader(model.network, model.reading, model.device)
        self._has_keys = use_memory and model.combiner.uses_neighbours
        self._key_reader: IncrementalReader | None = None
        if self._has_keys:
            encoder = model.encoder
            shared = encoder.model is model.network and encoder.reading == model.reading
            self._key_reader = None if shared else IncrementalReader(encoder.model, encoder.reading, model.device)
        self._context = np.zeros(0, np.int64)  # the last tokens, in the form that `last_contexts` takes
        self._previous: Retrieved | None = None

    def __len__(self) -> int:
        return len(self._reader)

    def copied(self) -> "Decoder":
        """Returns an independent decoder that has read the same tokens."""
        other = object.__new__(Decoder)
        other.model, other.use_memory, other._previous = self.model, self.use_memory, self._previous
        other._has_keys, other._context = self._has_keys, self._context
        other._reader = self._reader.copied()
        other._key_reader = None if self._key_reader is None else self._key_reader.copied()
        return other

    def feed(self, tokens: Sequence[int]) -> EncodedTokens:
        """Reads further tokens and returns their hidden states and keys."""
        first = not len(self)
        hidden = self._reader.feed(tokens)
        queries = hidden if self._key_reader is None else self._key_reader.feed(tokens)
        keys = self.model.store.keys_of(queries) if self._has_keys else np.zeros((len(hidden), 0), np.float16)
        numbers = np.array(tokens, np.int64) + 1
        if first and numbers[0] == self.model.tokeniser.start + 1:
            numbers[0] = BORDER  # x_0 is no part of the text
        text = np.concatenate([self._context, numbers])
        self._context = text[-LONGEST:]
        return EncodedTokens(hidden, keys, last_contexts(text, len(tokens)))

    @property
    def at_once(self) -> int:
        """Number of positions that may be predicted together: 1 with a policy, as each then depends on the last."""
        return _ROWS if self.model.policy is None or not self.use_memory else 1

    @torch.inference_mode()
    def predict(self, encoded: EncodedTokens, last: int) -> tuple[CombinedPrediction, Retrieved]:
        """Returns the distribution after the token `last`, and what was retrieved for it.

        Positions must be given in order.
        """
        model = self.model
        retrieved = self._neighbours(encoded, last) if self._has_keys else Retrieved.empty(len(encoded))
        if self.use_memory and model.combiner.uses_matches:
            retrieved = model.models.add_matches(retrieved, encoded.contexts)
        retrieved = self._previous = retrieved.to(model.device)
        return model.combiner.combine(model.network, encoded.hidden, retrieved), retrieved

    def _neighbours(self, encoded: EncodedTokens, last: int) -> Retrieved:
        """Returns neighbours: searched for or, where the policy expects little of that, advanced from the last ones."""
        model = self.model
        if model.policy is None or float(model.policy(encoded.hidden)) > model.threshold:
            return model.search(encoded.keys)
        if self._previous is None:
            return Retrieved.empty(1)
        return advance_neighbours(self._previous, torch.tensor([last], device=model.device), model.store.entries())
