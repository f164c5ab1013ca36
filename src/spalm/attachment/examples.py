"""Positions from which a combiner learns, on which it is calibrated, and on which it is measured.

The mixture learns from training positions that do not see their own document: to a frozen model they are as new as dev.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spalm.attachment.base import PretrainedBase
from spalm.attachment.dynamic import nearest_in_past
from spalm.attachment.settings import AttachSettings
from spalm.console import bar
from spalm.corpus import Corpus, TokenStream
from spalm.memory import Memory
from spalm.semiparametric import BaseOutputs, Retrieved, Search, TrainingExamples, advance_neighbours

_ROWS = 256
"""Positions whose distributions over the vocabulary are held at a time."""
_PIECE = 256
"""Positions in a row that are learned from."""
_QUESTION_SHARE = 5
"""One position in so many is learned as part of a question."""
_QUESTION_TOKENS, _LEAST_CONTEXT = 48, 6
"""Tokens of a question, and the offset in it from which on its positions are learned."""


@dataclass(frozen=True)
class ExampleSets:
    """Positions with what was retrieved for them: to learn from, to calibrate on, to measure on."""

    train: TrainingExamples
    advanced: TrainingExamples
    """The training positions again, with neighbours advanced from the position before instead of searched for."""
    questions: TrainingExamples
    """Training text again, as one asks for it: with little context, and with its document in the memory."""
    dev: TrainingExamples
    test: TrainingExamples
    test_text: TokenStream
    dev_past: Retrieved
    """What dev positions find among the last ones before them."""

    @classmethod
    def of(
        cls, base: PretrainedBase, corpus: Corpus, memory: Memory, search: Search, settings: AttachSettings
    ) -> "ExampleSets":
        train, advanced = _training_examples(base, memory, search, settings)
        questions = _question_examples(base, memory, search, corpus.split("train"), settings)
        texts = [corpus.split(split).beginning(settings.held_out) for split in ("dev", "test")]
        dev, test = (examples_of_text(base, memory, search, text) for text in texts)
        past = nearest_in_past(memory.keys_of(dev.base.hidden), dev.targets.numpy(), search.count, settings.cache)
        return cls(train, advanced, questions, dev, test, texts[1], past)


def _training_examples(
    base: PretrainedBase, memory: Memory, search: Search, settings: AttachSettings
) -> list[TrainingExamples]:
    """From pieces of the memory's own documents, each without its document. Their keys are their hidden states."""
    entries = memory.entries()
    count = len(entries) if search.below is None else entries.first_row(search.below)
    rows = _pieces(count, settings)
    ids, tokens = entries.ids(rows), torch.from_numpy(entries.take_tokens(rows)).long()
    keys = entries.take(rows).astype(np.float32)
    with bar("neighbours of training positions", None):
        retrieved = search(keys, own=ids)
    documents = entries.live_documents.index_of(ids)
    goes_on = np.append(False, (np.diff(ids) == 1) & (np.diff(documents) == 0))
    before = retrieved[np.maximum(np.arange(len(rows)) - 1, 0)]
    before.distances[~goes_on] = torch.inf
    advanced = advance_neighbours(before, tokens.roll(1), entries)
    return examples_of_several(base, torch.from_numpy(keys), [retrieved, advanced], tokens)


def _question_examples(
    base: PretrainedBase, memory: Memory, search: Search, train: TokenStream, settings: AttachSettings
) -> TrainingExamples:
    """Short pieces from within training documents, read as if they were the beginning of a text.

    Held-out text never tells that a memory may hold the very words: a question about what it holds does. Without these,
    a fact that stands in one document only is not trusted.
    """
    random = np.random.default_rng(settings.seed)
    starts = random.integers(
        0, max(1, len(train) - _QUESTION_TOKENS), settings.positions // _QUESTION_SHARE // _QUESTION_TOKENS + 1
    )
    texts = [train.tokens[start : start + _QUESTION_TOKENS] for start in np.sort(starts)]
    ends = np.cumsum([len(text) for text in texts])
    stream = TokenStream(np.concatenate(texts), ends, lambda: ["request"] * len(texts), train.start)
    examples = examples_of_text(base, memory, search, stream)
    offsets = np.arange(len(stream)) - stream.begins[stream.documents_of(np.arange(len(stream)))]
    return examples[torch.from_numpy(np.flatnonzero(offsets >= _LEAST_CONTEXT))]


def _pieces(count: int, settings: AttachSettings) -> np.ndarray:
    """Rows of a memory: as many as are to be learned from, in pieces from all over it."""
    random = np.random.default_rng(settings.seed)
    pieces = random.permutation(-(-count // _PIECE))[: -(-settings.positions // _PIECE)]
    rows = (np.sort(pieces)[:, None] * _PIECE + np.arange(_PIECE)).reshape(-1)
    return rows[rows < count]


def examples_of_text(base: PretrainedBase, memory: Memory, search: Search, text: TokenStream) -> TrainingExamples:
    """Every position of a text, with what the memory holds for it."""
    hidden = base.hidden(text, f"read {len(text.names):,} document(s)")
    with bar("neighbours", None):
        retrieved = search(memory.keys_of(hidden))
    return examples_of(base, hidden, retrieved, torch.from_numpy(text.targets(np.arange(len(text)))))


def examples_of(base: PretrainedBase, hidden: Tensor, retrieved: Retrieved, targets: Tensor) -> TrainingExamples:
    """What the model says at positions whose hidden states are known."""
    return examples_of_several(base, hidden, [retrieved], targets)[0]


def examples_of_several(
    base: PretrainedBase, hidden: Tensor, several: list[Retrieved], targets: Tensor
) -> list[TrainingExamples]:
    """The same for several lists of what was retrieved for these positions."""
    # Room is made beforehand. What is kept of each round would lie where its large tensors had been, and those of the
    # next would not fit there: gigabytes were lost so.
    outputs, log_base = [BaseOutputs.allocate(hidden, retrieved) for retrieved in several], torch.empty(len(hidden))
    with bar("predict", len(hidden)) as shown:
        for rows, log_probabilities in predictions(base, hidden):
            for whole, retrieved in zip(outputs, several):
                whole[rows] = BaseOutputs.of(hidden[rows], log_probabilities, retrieved[rows])
            log_base[rows] = log_probabilities.gather(-1, targets[rows, None])[:, 0]
            shown.advance(len(rows))
    return [TrainingExamples(whole, retrieved, log_base, targets) for whole, retrieved in zip(outputs, several)]


def predictions(base: PretrainedBase, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's log-probabilities of the whole vocabulary, some rows at a time."""
    for rows in torch.arange(len(hidden)).split(_ROWS):
        with torch.no_grad():
            yield rows, base.model.log_probabilities(hidden[rows].to(base.device)).cpu()
