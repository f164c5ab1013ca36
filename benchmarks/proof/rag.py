"""In-context retrieval: passages found by BM25 (bm25s) are put before the text, and chosen anew every 64 tokens.

As Ram et al. (2023) do it: the query is the end of the text so far, the best passage stands next to the text, with a
blank line between them, and the text keeps as much of its own context as fits. Before its first 64 tokens a document
has no query, hence no passage.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from spalm.attachment.base import PretrainedBase
from spalm.console import bar
from spalm.corpus import Tokeniser, TokenStream

PASSAGE, EVERY = 256, 64
"""Number of tokens of a passage, and of those that are predicted with the same passages."""


@dataclass(frozen=True)
class RagSettings:
    """What in-context retrieval is tuned over."""

    query: int = 64
    """Number of tokens of a query."""
    passages: int = 1
    """Number of passages; 0: the text alone, which may be best."""
    k1: float = 1.5
    b: float = 0.75

    @classmethod
    def grid(cls) -> "list[RagSettings]":
        """Returns the settings that are tried on dev, the most different ones first."""
        some = [cls(query, count, k1, b) for k1, b, count, query in product((1.5, 0.9), (0.75, 0.4), (1, 2), (64, 32))]
        return [cls(passages=0), *some]


@dataclass(frozen=True)
class Passages:
    """Pieces of 256 tokens of some documents, with their texts."""

    pieces: list[np.ndarray]
    texts: list[str]
    separator: list[int]
    """Tokens of the blank line after a passage."""
    core_seconds: float
    """Core-seconds that making them took."""

    @classmethod
    def of(cls, text: TokenStream, tokeniser: Tokeniser) -> "Passages":
        """Divides the documents of a text."""
        begun = time.process_time()
        pieces = [
            text.tokens[start : min(start + PASSAGE, end)].astype(np.int64)
            for begin, end in zip(text.begins.tolist(), text.ends.tolist())
            for start in range(begin, end, PASSAGE)
        ]
        texts = [tokeniser.decode(piece.tolist()) for piece in pieces]
        separator = tokeniser.encode([b"\n\n"])[0].tolist()
        return cls(pieces, texts, separator, time.process_time() - begun)

    def plus(self, other: "Passages") -> "Passages":
        """Returns these passages and others."""
        pieces, texts = [*self.pieces, *other.pieces], [*self.texts, *other.texts]
        return Passages(pieces, texts, self.separator, self.core_seconds + other.core_seconds)


class PassageRetriever:
    """An index of passages by bm25s."""

    def __init__(self, passages: Passages, tokeniser: Tokeniser, settings: RagSettings):
        import bm25s

        begun = time.process_time()
        self.passages, self.settings, self._tokeniser = passages, settings, tokeniser
        self._index = bm25s.BM25(k1=settings.k1, b=settings.b)
        self._index.index(bm25s.tokenize(passages.texts, show_progress=False), show_progress=False)
        self.core_seconds = passages.core_seconds + time.process_time() - begun
        """Core-seconds that dividing the text and building the index took."""

    def best(self, context: Sequence[int]) -> list[np.ndarray]:
        """Returns the passages that fit the end of a context best, the best last."""
        import bm25s

        count = min(self.settings.passages, len(self.passages.pieces))
        if not len(context) or not count:
            return []
        query = self._tokeniser.decode(context[-self.settings.query :])
        words = bm25s.tokenize([query], return_ids=False, show_progress=False)
        if not words[0]:
            return []
        numbers, scores = self._index.retrieve(words, k=count, show_progress=False)
        return [self.passages.pieces[number] for number, score in zip(numbers[0], scores[0]) if score > 0][::-1]

    def prompt(self, before: list[int], start: int, *, room: int) -> list[int]:
        """Returns the start symbol, passages that fit what came before, and the end of that."""
        return prompt_with_passages(before, self.best(before), start, separator=self.passages.separator, room=room)


def prompt_with_passages(
    before: list[int], passages: list[np.ndarray], start: int, *, separator: list[int], room: int
) -> list[int]:
    """Returns the start symbol, passages and the end of what came before, at most `room` tokens.

    A separator follows each passage. At least half of the room is left to the text; passages that do not fit are cut at
    their beginning.
    """
    above = [token for passage in passages for token in [*passage.tolist(), *separator]]
    left = max(room // 2, room - 1 - len(above))
    kept = before[-left + 1 :] if len(before) >= left else before
    above = above[max(0, len(above) - (room - 1 - len(kept))) :]
    return [start, *above, *kept]


class BlockReader:
    """Reads texts in blocks, each after what was retrieved for it.

    Blocks with the same inputs are read once: many settings retrieve the same passages.
    """

    def __init__(self, base: PretrainedBase):
        self._base = base
        self._context = min(base.context, base.model.context_length or base.context)
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def hidden(self, text: TokenStream, retriever: PassageRetriever, title: str) -> tuple[Tensor, int]:
        """Returns the hidden state of every position of a text, and how many tokens were read for them."""
        found, read = torch.zeros(len(text), self._base.model.width), 0
        with bar(title, len(text)) as shown:
            for begin, end in zip(text.begins.tolist(), text.ends.tolist()):
                for start in range(begin, end, EVERY):
                    stop = min(end, start + EVERY)
                    before, block = text.tokens[begin:start].tolist(), text.tokens[start:stop].tolist()
                    inputs = retriever.prompt(before, text.start, room=self._context - len(block)) + block[:-1]
                    found[start:stop] = self._read(inputs, len(block))
                    read += len(inputs)
                    shown.advance(len(block))
        return found, read

    def _read(self, inputs: list[int], last: int) -> Tensor:
        """Returns the hidden states of the last inputs."""
        known = (last, *inputs)
        if known not in self._known:
            hidden = self._base.model.hidden(torch.tensor([inputs], device=self._base.device))[0]
            self._known[known] = hidden[len(inputs) - last :].float().cpu()
        return self._known[known]


def mean_log_probability(base: PretrainedBase, hidden: Tensor, text: TokenStream) -> float:
    """Returns the mean log p of the tokens of a text."""
    targets = torch.from_numpy(text.targets(np.arange(len(text))))
    return float(base.model.target_log_probabilities(hidden.to(base.device), targets.to(base.device)).double().mean())


def beginnings(text: TokenStream, length: int) -> TokenStream:
    """Returns at most the first `length` tokens of every document."""
    counts = np.minimum(text.ends - text.begins, length)
    parts = [text.tokens[begin : begin + count] for begin, count in zip(text.begins.tolist(), counts.tolist())]
    return TokenStream(np.concatenate(parts), np.cumsum(counts), lambda: text.names, start=text.start)
