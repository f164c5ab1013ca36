"""Texts scored with memories and without, and what a memory of training documents alone finds."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spalm.attachment import Attached
from spalm.attachment.fitting.examples import examples_with_each
from spalm.attachment.fitting.learning import mixture_log_probabilities
from spalm.attachment.keyed_text import KeyedText
from spalm.corpus import TokenStream
from spalm.memory import source_of_split
from spalm.memory.exact import reversed_contexts
from spalm.semiparametric import MemorySearch, Retrieved, Search


def end_of_training(attached: Attached) -> int:
    """Returns the id below which the memory holds training documents and the library, and nothing of dev or test."""
    ids = [attached.memory.first_id(source_of_split(attached.corpus, split)) for split in ("dev", "test")]
    return min(id for id in ids if id is not None)


def search_of_training(attached: Attached) -> MemorySearch:
    """Returns a search that finds nothing of dev and test, which the memory holds by now."""
    below, memory = end_of_training(attached), attached.memory
    nearest = Search(attached.search.searcher, attached.search.count, below=below) if attached.has_keys else None
    return MemorySearch(memory, nearest, memory.exact.current().below(below))


def entries_searched(attached: Attached) -> dict[str, int]:
    """Returns the numbers of entries, with keys and in all, in which such a search looks."""
    entries, below = attached.memory.entries(), end_of_training(attached)
    return {"keys": entries.with_keys.first_row(below), "exact": entries.first_row(below)}


def positions_learned_from(attached: Attached) -> int:
    """Returns the number of training positions that the mixture could learn from: those with keys, if they are few."""
    chosen = KeyedText.choose(attached.corpus.split("train"), attached.settings, attached.corpus)
    return min(attached.settings.positions, len(chosen.with_keys))


def stream_of(attached: Attached, texts: Sequence[str]) -> TokenStream:
    """Returns texts as documents of a stream, each with at least a token, as far as the model reads at once."""
    longest = min(attached.settings.context, attached.base.model.context_length or attached.settings.context)
    encoded = [ids[:longest] for ids in attached.corpus.tokeniser.encode([text.encode() for text in texts])]
    ends = np.cumsum([len(ids) for ids in encoded])
    return TokenStream(
        np.concatenate(encoded), ends, lambda: ["text"] * len(encoded), start=attached.corpus.tokeniser.start
    )


def retrieved_for(attached: Attached, stream: TokenStream, rows: np.ndarray, *, hidden: Tensor) -> Retrieved:
    """Returns what the memory of training documents has for some positions of a text with these hidden states."""
    search = search_of_training(attached)
    return search(search.memory.keys_of(hidden), reversed_contexts(stream, rows))


def off_and_on(
    memories: Mapping[str, Attached], stream: TokenStream, rows: np.ndarray | None = None
) -> dict[str, Tensor]:
    """Returns log p of every token of a text, by the model alone (`plain`) and with each of its memories.

    `rows` are the positions that are scored, by default all; at the others log p is 0.
    """
    base = next(iter(memories.values())).base
    rows = np.arange(len(stream)) if rows is None else rows
    hidden = base.hidden(stream, "read")[torch.from_numpy(rows)]
    found = [retrieved_for(attached, stream, rows, hidden=hidden) for attached in memories.values()]
    examples = examples_with_each(base, hidden, found, targets=torch.from_numpy(stream.targets(rows)))
    scores = {"plain": examples[0].log_base}
    for (name, attached), each in zip(memories.items(), examples):
        scores[name] = mixture_log_probabilities(attached.mixture, each)
    places = torch.from_numpy(rows)
    return {name: torch.zeros(len(stream)).index_put((places,), each) for name, each in scores.items()}
