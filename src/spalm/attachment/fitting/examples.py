"""Examples from which a combiner learns, on which it is calibrated, and on which it is measured.

The mixture learns from training positions for which only other documents are searched. A frozen model was not trained
on them, so they are as new to it as dev.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.attachment.base import PretrainedBase
from spalm.attachment.dynamic import nearest_in_past
from spalm.attachment.estimate import QUESTION_SHARE
from spalm.attachment.fitting.own_text import write_own_text
from spalm.attachment.settings import AttachSettings
from spalm.console import bar
from spalm.corpus import Corpus, TokenStream
from spalm.memory import MISSING, Memory, source_of_split
from spalm.memory.exact import reversed_contexts
from spalm.runs import HELD_OUT, HeldOut
from spalm.semiparametric import BaseOutputs, MemorySearch, Retrieved, TrainingExamples, advance_neighbours

_BATCH = 256
"""Positions whose distributions over the vocabulary are in memory at a time."""
_PIECE = 256
"""Length of the pieces of consecutive positions that are learned from."""
_QUESTION_TOKENS, _LEAST_CONTEXT = 48, 6
"""Number of tokens of a question, and the offset in it of the first position that is learned from."""


@dataclass(frozen=True)
class LearnedText:
    """The training documents from which the combiner learns."""

    text: TokenStream
    first_id: int
    """Id of the entry of its first position; the others follow."""


@dataclass(frozen=True)
class ExampleSets:
    """Positions with their neighbours: to learn from, to calibrate on, to measure on."""

    train: TrainingExamples
    advanced: TrainingExamples
    """The training positions again, with neighbours advanced from the position before instead of searched for."""
    questions: TrainingExamples
    """Pieces of training text read as questions are: with little context, and with their own document in the memory."""
    own: TrainingExamples
    """Positions of text that the model wrote by itself; there are none if the settings ask for none."""
    dev: TrainingExamples
    test: TrainingExamples
    dev_text: TokenStream
    """The text of which `dev` holds every position."""
    test_text: TokenStream
    """The text of which `test` holds every position."""
    dev_past: Retrieved | None
    """Neighbours of the dev positions among the last positions before them; None: the memory has no keys."""

    @classmethod
    def collect(
        cls,
        base: PretrainedBase,
        corpus: Corpus,
        search: MemorySearch,
        *,
        learned: LearnedText,
        settings: AttachSettings,
    ) -> "ExampleSets":
        """Reads and searches everything that the examples need."""
        if search.nearest is None:
            train = advanced = _examples_without_keys(base, search, learned, settings=settings)
        else:
            train, advanced = _examples_with_keys(base, search, learned, settings=settings)
        questions = _question_examples(base, search, learned.text, settings=settings)
        own = _own_examples(base, search, settings, start=learned.text.start) if settings.own_text else train[:0]
        texts, (dev, test) = zip(
            *(_held_out_examples(base, search, corpus, split=split, settings=settings) for split in HELD_OUT)
        )
        past = None
        if search.nearest is not None:
            keys, count = search.memory.keys_of(dev.base.hidden), search.nearest.count
            past = nearest_in_past(keys, dev.targets.numpy(), count, reach=settings.cache)
        return cls(train, advanced, questions, own, dev, test, texts[0], texts[1], past)


def _held_out_examples(
    base: PretrainedBase, search: MemorySearch, corpus: Corpus, *, split: HeldOut, settings: AttachSettings
) -> tuple[TokenStream, TrainingExamples]:
    """Returns text of dev or test, and every position of it; keys that the memory has of it need not be made again."""
    text, positions = held_out_text(corpus.split(split), settings)
    known = None
    if search.nearest is not None and search.memory.projection is None:
        known = _known_states(search.memory, source_of_split(corpus, split), positions)
    return text, examples_from_text(
        base, search, text, title=f"read {split}: {len(text.ends):,} document(s)", known=known
    )


def held_out_text(text: TokenStream, settings: AttachSettings) -> tuple[TokenStream, Int[np.ndarray, "n"]]:
    """Returns the text of a split on which a combiner is calibrated or measured, and its positions in the split.

    A long split is represented by the beginnings of documents from all over it.
    """
    if len(text) <= settings.held_out:
        return text, np.arange(len(text))
    positions, ends = _beginnings(text, settings.held_out, settings)
    return TokenStream(text.tokens[positions], ends, lambda: ["document"] * len(ends), start=text.start), positions


def _known_states(
    memory: Memory, source: dict[str, Any], positions: Int[np.ndarray, "n"]
) -> Float[Tensor, "n width"] | None:
    """Returns the hidden states of positions of a source, which are their keys; None if they have none.

    A beginning of a document is the first window in which the model reads it, so its hidden states are the same there.
    """
    first = memory.first_id(source)
    entries = memory.entries().with_keys
    rows = entries.rows((MISSING if first is None else first) + positions)
    if first is None or (rows == MISSING).any():
        return None
    return torch.from_numpy(entries.take(rows).astype(np.float32))


def _beginnings(
    text: TokenStream, count: int, settings: AttachSettings
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "documents"]]:
    """Returns positions of the beginnings of documents drawn at random, about `count`, and where each of them ends.

    A beginning is at most as long as what the model reads at once.
    """
    order = np.random.default_rng(settings.seed).permutation(len(text.ends))
    lengths = np.minimum(text.ends - text.begins, settings.context)
    enough = int(np.searchsorted(np.cumsum(lengths[order]), count)) + 1
    documents = np.sort(order[:enough])
    begins, counts = text.begins[documents], lengths[documents]
    positions = np.concatenate([np.arange(begin, begin + count) for begin, count in zip(begins, counts)])
    return positions, np.cumsum(counts)


def _examples_without_keys(
    base: PretrainedBase, search: MemorySearch, learned: LearnedText, *, settings: AttachSettings
) -> TrainingExamples:
    """Returns positions from the beginnings of training documents, read now, with exact matches in other documents."""
    text = learned.text
    positions, ends = _beginnings(text, settings.positions, settings)
    sample = TokenStream(text.tokens[positions], ends, lambda: ["document"] * len(ends), start=text.start)
    hidden = base.hidden(sample, "read training documents")
    with bar("exact matches of training positions", None):
        matched = search.matches(reversed_contexts(text, positions), learned.first_id + positions)
    retrieved = replace(Retrieved.empty(len(positions)), matched=matched)
    return examples_from_hidden(base, hidden, retrieved, targets=torch.from_numpy(text.targets(positions)))


def _examples_with_keys(
    base: PretrainedBase, search: MemorySearch, learned: LearnedText, *, settings: AttachSettings
) -> list[TrainingExamples]:
    """Returns training positions with neighbours from other documents, searched for and advanced.

    They are pieces of consecutive entries of the memory, whose keys serve as their hidden states.
    """
    entries = search.memory.entries().with_keys
    rows = _pieces(entries.first_row(learned.first_id + len(learned.text)), settings)
    ids, tokens = entries.ids(rows), torch.from_numpy(entries.take_tokens(rows)).long()
    keys = entries.take(rows).astype(np.float32)
    with bar("search for training positions", None):
        retrieved = search(keys, reversed_contexts(learned.text, ids - learned.first_id), own=ids)
    documents = entries.live_documents.index_of(ids)
    continues = np.append(False, (np.diff(ids) == 1) & (np.diff(documents) == 0))
    previous = retrieved[np.maximum(np.arange(len(rows)) - 1, 0)]
    previous.distances[~continues] = torch.inf
    advanced = replace(advance_neighbours(previous, tokens.roll(1), entries), matched=retrieved.matched)
    return examples_with_each(base, torch.from_numpy(keys), [retrieved, advanced], targets=tokens)


def _question_examples(
    base: PretrainedBase, search: MemorySearch, train: TokenStream, *, settings: AttachSettings
) -> TrainingExamples:
    """Returns short pieces from within training documents, read as if they were the beginning of a text.

    For held-out text the memory never holds the very same words; for a question about its documents it does. Without
    these examples the mixture would not trust a fact that occurs in only one document.
    """
    random = np.random.default_rng(settings.seed)
    starts = random.integers(
        0, max(1, len(train) - _QUESTION_TOKENS), settings.positions // QUESTION_SHARE // _QUESTION_TOKENS + 1
    )
    texts = [train.tokens[start : start + _QUESTION_TOKENS] for start in np.sort(starts)]
    ends = np.cumsum([len(text) for text in texts])
    stream = TokenStream(np.concatenate(texts), ends, lambda: ["question"] * len(texts), start=train.start)
    examples = examples_from_text(base, search, stream, title=f"read {len(texts):,} short pieces as questions")
    offsets = np.arange(len(stream)) - stream.begins[stream.documents_of(np.arange(len(stream)))]
    return examples[torch.from_numpy(np.flatnonzero(offsets >= _LEAST_CONTEXT))]


def _own_examples(
    base: PretrainedBase, search: MemorySearch, settings: AttachSettings, *, start: int
) -> TrainingExamples:
    """Returns the positions of text that the model writes by itself, with what the memory has for them."""
    text, hidden = write_own_text(base, settings.own_text, start=start, seed=settings.seed)
    examples = examples_from_text(base, search, text, known=hidden)
    predicted = np.setdiff1d(np.arange(len(text)), text.begins)  # first tokens are not the model's
    return examples[torch.from_numpy(predicted)]


def _pieces(count: int, settings: AttachSettings) -> np.ndarray:
    """Returns rows of a memory to learn from, in pieces from all over it."""
    random = np.random.default_rng(settings.seed)
    pieces = random.permutation(-(-count // _PIECE))[: -(-settings.positions // _PIECE)]
    rows = (np.sort(pieces)[:, None] * _PIECE + np.arange(_PIECE)).reshape(-1)
    return rows[rows < count]


def examples_from_text(
    base: PretrainedBase,
    search: MemorySearch,
    text: TokenStream,
    *,
    title: str = "read documents",
    known: Float[Tensor, "n width"] | None = None,
) -> TrainingExamples:
    """Returns every position of a text, with what the memory has for it; `known` are its hidden states, if they are."""
    hidden = base.hidden(text, title) if known is None else known
    with bar("search", None):
        retrieved = search(search.memory.keys_of(hidden), reversed_contexts(text, np.arange(len(text))))
    return examples_from_hidden(base, hidden, retrieved, targets=torch.from_numpy(text.targets(np.arange(len(text)))))


def examples_from_hidden(
    base: PretrainedBase, hidden: Tensor, retrieved: Retrieved, *, targets: Tensor
) -> TrainingExamples:
    """Returns positions whose hidden states are known, with the model's outputs."""
    return examples_with_each(base, hidden, [retrieved], targets=targets)[0]


def examples_with_each(
    base: PretrainedBase, hidden: Tensor, neighbours: list[Retrieved], *, targets: Tensor
) -> list[TrainingExamples]:
    """Returns the examples of some positions for each of several sets of neighbours; the model predicts only once."""
    # Results are allocated beforehand: small tensors kept from each batch would fragment the heap, as the large ones
    # of the next batch would not fit between them. That cost gigabytes.
    outputs, log_base = [BaseOutputs.allocate(hidden, retrieved) for retrieved in neighbours], torch.empty(len(hidden))
    with bar("predict", len(hidden)) as shown:
        for rows, log_probabilities in predict_in_batches(base, hidden):
            for whole, retrieved in zip(outputs, neighbours):
                whole[rows] = BaseOutputs.of(hidden[rows], log_probabilities, retrieved[rows])
            log_base[rows] = log_probabilities.gather(-1, targets[rows, None])[:, 0]
            shown.advance(len(rows))
    return [TrainingExamples(whole, retrieved, log_base, targets) for whole, retrieved in zip(outputs, neighbours)]


def predict_in_batches(base: PretrainedBase, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (rows, log-probabilities of the whole vocabulary), batch by batch."""
    for rows in torch.arange(len(hidden)).split(_BATCH):
        with torch.no_grad():
            yield rows, base.model.log_probabilities(hidden[rows].to(base.device)).cpu()
