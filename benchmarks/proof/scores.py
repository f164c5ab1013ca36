"""Texts scored with a memory and without it, and what a memory of training documents alone finds."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spalm.attachment import Attached
from spalm.attachment.fitting.examples import examples_from_text
from spalm.attachment.fitting.learning import mixture_log_probabilities
from spalm.corpus import TokenStream
from spalm.memory import source_of_split
from spalm.semiparametric import MemorySearch, Search


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


def stream_of(attached: Attached, texts: Sequence[str]) -> TokenStream:
    """Returns texts as documents of a stream, each with at least a token, as far as the model reads at once."""
    longest = min(attached.settings.context, attached.base.model.context_length or attached.settings.context)
    encoded = [ids[:longest] for ids in attached.corpus.tokeniser.encode([text.encode() for text in texts])]
    ends = np.cumsum([len(ids) for ids in encoded])
    return TokenStream(
        np.concatenate(encoded), ends, lambda: ["text"] * len(encoded), start=attached.corpus.tokeniser.start
    )


def off_and_on(attached: Attached, stream: TokenStream) -> dict[str, Tensor]:
    """Returns log p of every token of a text, by the model alone and with the memory of training documents."""
    examples = examples_from_text(attached.base, search_of_training(attached), stream)
    return {"plain": examples.log_base, "adaptive": mixture_log_probabilities(attached.mixture, examples)}


def sums_of_tails(scores: Tensor, stream: TokenStream, starts: Sequence[int]) -> list[float]:
    """Returns for every document the sum of log p over its tokens from a place in it on."""
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), scores.double().cumsum(0)])
    first = torch.from_numpy(stream.begins + np.asarray(starts)).long()
    return (sums[torch.from_numpy(stream.ends).long()] - sums[first]).tolist()
