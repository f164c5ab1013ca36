"""Decoding: tokens in, the distribution of the next token out, with the memory searched at most once a token."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spalm.compute import threads_for
from spalm.generation.memories import MemorySelection
from spalm.lm import IncrementalReader, Outputs
from spalm.memory.exact import BORDER, LONGEST, last_contexts
from spalm.semiparametric import CombinedPrediction, PlainCombiner, Retrieved, advance_neighbours

if TYPE_CHECKING:
    from spalm.generation.model import Model

_FLOPS_OF_A_ROW = 3e7
"""What a prediction with the memory costs at each position, in operations of a forward pass that takes as long."""
_ROWS = 64
"""Positions of one text that are predicted together."""


@dataclass(frozen=True)
class EncodedTokens:
    """What the network and the encoder computed for each token that was read."""

    hidden: Tensor
    """Hidden states, from which the next token is predicted."""
    keys: np.ndarray
    """Keys with which the memory is searched for nearest contexts; without columns if it is not."""
    contexts: np.ndarray
    """The last tokens read, with which the memory is searched for exact matches (see `reversed_contexts`); without
    columns if it is not."""

    logits: Tensor | None = None
    """Logits of the next token, where the network computed them already."""

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, rows) -> "EncodedTokens":
        logits = None if self.logits is None else self.logits[rows]
        return EncodedTokens(self.hidden[rows], self.keys[rows], self.contexts[rows], logits)

    @classmethod
    def concatenate(cls, parts: "list[EncodedTokens]") -> "EncodedTokens":
        """Returns several groups of positions as one."""
        if len(parts) == 1:
            return parts[0]
        outputs = Outputs.concatenate([Outputs(part.hidden, part.logits) for part in parts])
        keys, contexts = (np.concatenate([getattr(part, name) for part in parts]) for name in ("keys", "contexts"))
        return cls(outputs.hidden, keys, contexts, outputs.logits)


class Decoder:
    """Reads a growing text and predicts its next token, with the memory or without it."""

    def __init__(self, model: "Model", *, use_memory: bool = True, memories: MemorySelection | None = None):
        """`memories` are those that are searched; None: all that are open."""
        self.model = model
        chosen = model.models.memories.select() if memories is None else memories
        self.memories = chosen if use_memory and chosen.names else None
        """The memories that are searched; None: the network predicts alone."""
        self._reader = IncrementalReader(model.network, model.reading, model.device)
        self._has_keys = self.use_memory and model.combiner.uses_neighbours
        self._key_reader: IncrementalReader | None = None
        if self._has_keys:
            encoder = model.encoder
            shared = encoder.model is model.network and encoder.reading == model.reading
            self._key_reader = None if shared else IncrementalReader(encoder.model, encoder.reading, model.device)
        self._previous: Retrieved | None = None

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def use_memory(self) -> bool:
        """Whether any memory is searched."""
        return self.memories is not None

    def searches_as(self, other: "Decoder") -> bool:
        """Returns whether another decoder searches the same memories: then one can go on with what the other read."""
        return _names(self) == _names(other)

    @property
    def tokens(self) -> list[int]:
        """The tokens read so far."""
        return self._reader.tokens

    def copied(self) -> "Decoder":
        """Returns an independent decoder that has read the same tokens."""
        other = object.__new__(Decoder)
        other.model, other.memories, other._previous = self.model, self.memories, self._previous
        other._has_keys = self._has_keys
        other._reader = self._reader.copied()
        other._key_reader = None if self._key_reader is None else self._key_reader.copied()
        return other

    def feed(self, tokens: Sequence[int]) -> EncodedTokens:
        """Reads further tokens and returns their hidden states and keys."""
        return self.feed_together([self], [tokens])[0]

    @classmethod
    def feed_together(
        cls, decoders: "Sequence[Decoder]", pieces: Sequence[Sequence[int]], needed: Sequence[int] | None = None
    ) -> list[EncodedTokens]:
        """Reads further tokens of several texts with one model, in one pass where it can do that.

        `needed` is the number of last positions of each piece that are returned; None: all.
        """
        counts = [len(piece) for piece in pieces] if needed is None else needed
        outputs = IncrementalReader.read_together([decoder._reader for decoder in decoders], pieces, counts)
        return [
            decoder._encode(piece, output) for decoder, piece, output in zip(decoders, pieces, outputs, strict=True)
        ]

    def _encode(self, piece: Sequence[int], outputs: Outputs) -> EncodedTokens:
        """Returns what was computed for tokens that were just read, with the keys and queries for the memory."""
        count = len(outputs.hidden)
        queries = outputs.hidden
        if self._key_reader is not None:
            queries = self._key_reader.feed(piece)[len(piece) - count :]
        keys = self.model.store.keys_of(queries) if self._has_keys else np.zeros((count, 0), np.float16)
        contexts = np.zeros((count, 0), np.int64)
        if self.use_memory and self.model.combiner.uses_matches:
            contexts = last_contexts(self._last_numbers(count), count)
        return EncodedTokens(outputs.hidden, keys, contexts, outputs.logits)

    def _last_numbers(self, count: int) -> np.ndarray:
        """Returns the end of the text as `last_contexts` takes it, as much as the last `count` positions need."""
        kept = self.tokens[-LONGEST - count :]
        numbers = np.array(kept, np.int64) + 1
        if len(kept) == len(self) and kept and kept[0] == self.model.tokeniser.start:
            numbers[0] = BORDER  # x_0 is no part of the text
        return numbers

    @property
    def can_shorten(self) -> bool:
        """Whether the last tokens can be taken back."""
        return self._reader.can_shorten and (self._key_reader is None or self._key_reader.can_shorten)

    def take_back(self, tokens: int) -> None:
        """Forgets the last tokens that were read."""
        self._previous = None
        for reader in (self._reader, self._key_reader):
            if reader is not None:
                reader.shorten(len(reader) - tokens)

    @property
    def at_once(self) -> int:
        """Number of positions that may be predicted together: 1 with a policy, as each then depends on the last."""
        return _ROWS if self.model.policy is None or not self.use_memory else 1

    @torch.inference_mode()
    def predict(self, encoded: EncodedTokens, last: int) -> tuple[CombinedPrediction, Retrieved]:
        """Returns the distribution after the token `last`, and what was retrieved for it.

        Positions must be given in order.
        """
        with threads_for(_FLOPS_OF_A_ROW * len(encoded)):
            return self._predict(encoded, last)

    def _predict(self, encoded: EncodedTokens, last: int) -> tuple[CombinedPrediction, Retrieved]:
        model = self.model
        if self.memories is None:
            nothing = Retrieved.empty(len(encoded)).to(model.device)
            return PlainCombiner().combine(model.network, encoded.hidden, nothing, logits=encoded.logits), nothing
        retrieved = Retrieved.empty(len(encoded))
        if self._has_keys:
            retrieved = self._neighbours(self.memories, encoded, last)
        if model.combiner.uses_matches:
            retrieved = self.memories.add_matches(retrieved, encoded.contexts)
        retrieved = self._previous = retrieved.to(model.device)
        return model.combiner.combine(model.network, encoded.hidden, retrieved, logits=encoded.logits), retrieved

    def _neighbours(self, memories: MemorySelection, encoded: EncodedTokens, last: int) -> Retrieved:
        """Returns neighbours: searched for or, where the policy expects little of that, advanced from the last ones."""
        model = self.model
        if model.policy is None or float(model.policy(encoded.hidden)) > model.threshold:
            return memories.nearest(encoded.keys)
        if self._previous is None:
            return Retrieved.empty(1)
        return advance_neighbours(self._previous, torch.tensor([last], device=model.device), memories.entries())


def _names(decoder: Decoder) -> tuple[str, ...] | None:
    """Returns the names of the memories that a decoder searches; None if it searches none."""
    return None if decoder.memories is None else decoder.memories.names


def predict_together(
    texts: "Sequence[tuple[Decoder, EncodedTokens, int]]",
) -> list[tuple[CombinedPrediction, Retrieved]]:
    """Returns what `Decoder.predict` returns for each of several texts with one model.

    There is one search for all that search the same memories.
    """
    found: dict[int, tuple[CombinedPrediction, Retrieved]] = {}
    groups: dict[tuple[str, ...] | None, list[int]] = defaultdict(list)
    for number, (decoder, encoded, last) in enumerate(texts):
        if decoder.at_once > 1:
            groups[_names(decoder)].append(number)
        else:
            found[number] = decoder.predict(encoded, last)
    for group in groups.values():
        together = EncodedTokens.concatenate([texts[number][1] for number in group])
        combined, retrieved = texts[group[0]][0].predict(together, texts[group[-1]][2])
        start = 0
        for number in group:
            rows = slice(start, start + len(texts[number][1]))
            found[number] = combined[rows], retrieved[rows]
            start = rows.stop
    return [found[number] for number in range(len(texts))]
