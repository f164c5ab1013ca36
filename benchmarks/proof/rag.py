"""In-context retrieval: passages found by BM25 (bm25s) are put before the text, and chosen anew every 64 tokens.

As Ram et al. (2023) do it: the query is the end of the text so far, the best passage stands next to the text, and the
text keeps as much of its own context as fits. Before its first 64 tokens a document has no query, hence no passage.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

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
    k1: float = 1.5
    b: float = 0.75

    @classmethod
    def grid(cls) -> "list[RagSettings]":
        """Returns the settings that are tried on dev, the most different ones first."""
        return [cls(query, count, k1, b) for k1, b, count, query in product((1.5, 0.9), (0.75, 0.4), (1, 2), (64, 32))]


class PassageRetriever:
    """Passages of 256 tokens of some documents, in an index of bm25s."""

    def __init__(self, text: TokenStream, tokeniser: Tokeniser, settings: RagSettings):
        import bm25s

        begun = time.process_time()
        self._tokeniser, self._settings = tokeniser, settings
        self.passages = [
            text.tokens[start : min(start + PASSAGE, end)].astype(np.int64)
            for begin, end in zip(text.begins.tolist(), text.ends.tolist())
            for start in range(begin, end, PASSAGE)
        ]
        texts = [tokeniser.decode(passage.tolist()) for passage in self.passages]
        self._index = bm25s.BM25(k1=settings.k1, b=settings.b)
        self._index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        self.core_seconds = time.process_time() - begun
        """Core-seconds that building the index took."""

    def best(self, context: Sequence[int]) -> list[np.ndarray]:
        """Returns the passages that fit the end of a context best, the best last."""
        import bm25s

        query = self._tokeniser.decode(context[-self._settings.query :])
        words = bm25s.tokenize([query], return_ids=False, show_progress=False)
        if not len(context) or not words[0]:
            return []
        count = min(self._settings.passages, len(self.passages))
        numbers, scores = self._index.retrieve(words, k=count, show_progress=False)
        return [self.passages[number] for number, score in zip(numbers[0], scores[0]) if score > 0][::-1]


@torch.inference_mode()
def read_with_passages(
    base: PretrainedBase, text: TokenStream, retriever: PassageRetriever, *, title: str
) -> tuple[Tensor, int]:
    """Returns the hidden state of every position of a text, and how many tokens were read for them."""
    context = min(base.context, base.model.context_length or base.context)
    found, read = torch.zeros(len(text), base.model.width), 0
    with bar(title, len(text)) as shown:
        for begin, end in zip(text.begins.tolist(), text.ends.tolist()):
            for start in range(begin, end, EVERY):
                stop = min(end, start + EVERY)
                before, block = text.tokens[begin:start].tolist(), text.tokens[start:stop].tolist()
                inputs = prompt_with_passages(before, retriever.best(before), text.start, room=context - len(block))
                inputs += block[:-1]
                hidden = base.model.hidden(torch.tensor([inputs], device=base.device))[0]
                found[start:stop] = hidden[len(inputs) - len(block) :].float().cpu()
                read += len(inputs)
                shown.advance(len(block))
    return found, read


def prompt_with_passages(before: list[int], passages: list[np.ndarray], start: int, *, room: int) -> list[int]:
    """Returns the start symbol, passages and the end of what came before, at most `room` tokens.

    At least half of the room is left to the text; passages that do not fit are cut at their beginning.
    """
    above = [token for passage in passages for token in passage.tolist()]
    left = max(room // 2, room - 1 - len(above))
    kept = before[-left + 1 :] if len(before) >= left else before
    above = above[max(0, len(above) - (room - 1 - len(kept))) :]
    return [start, *above, *kept]


def mean_log_probability(base: PretrainedBase, hidden: Tensor, text: TokenStream) -> float:
    """Returns the mean log p of the tokens of a text."""
    targets = torch.from_numpy(text.targets(np.arange(len(text))))
    return float(base.model.target_log_probabilities(hidden.to(base.device), targets.to(base.device)).double().mean())


def tune_rag(
    base: PretrainedBase, train: TokenStream, dev: TokenStream, *, tokeniser: Tokeniser, tried: int
) -> list[dict[str, Any]]:
    """Returns the settings that were tried on dev, each with the mean log p that it gave, the best first."""
    found = []
    for settings in RagSettings.grid()[:tried]:
        retriever = PassageRetriever(train, tokeniser, settings)
        hidden, _ = read_with_passages(base, dev, retriever, title=f"RAG on dev: {settings}")
        found.append({**asdict(settings), "mean_log_p": mean_log_probability(base, hidden, dev)})
    return sorted(found, key=lambda each: -each["mean_log_p"])
