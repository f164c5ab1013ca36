"""Passages as the models read them: hidden states and neighbours, of which the last ones are kept.

Switching neighbours off or on then computes only the probabilities again.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from spalm.errors import InputError
from spalm.generation.models import ModelSet, Variant
from spalm.generation.score import read_states, stream_of_text
from spalm.memory import MISSING, Entries, Memory, source_of_split
from spalm.memory.exact import Excluded, reversed_contexts
from spalm.memory.forgotten import forgotten_documents
from spalm.neighbours import drop_neighbours
from spalm.runs import HeldOut
from spalm.semiparametric import Matched, Retrieved

LONGEST_PASSAGE = 2000
"""Number of tokens of the longest passage."""
_MOST_SIGNS = 32 * LONGEST_PASSAGE
"""Number of signs from which a text is refused before it is tokenised."""
_KEPT = 8
"""Number of read passages that are kept."""
_TITLE = "own text"
"""Title of a text that is not from the corpus."""


@dataclass(frozen=True)
class CorpusPassage:
    """A passage of the corpus."""

    split: HeldOut
    document: int
    """Number of the document in the split, as names need not be unique."""
    offset: int = 0
    """First token of the passage in the document."""
    length: int = 400


Passage = str | CorpusPassage
"""The user's own text, or a place in the corpus."""


@dataclass(frozen=True)
class Switches:
    """Parts of the memory that are switched off: entries by id, whole documents by their numbers in the memory."""

    entries: frozenset[int] = frozenset()
    documents: frozenset[int] = frozenset()


EVERYTHING_ON = Switches()


@dataclass(frozen=True)
class ReadPassage:
    """A passage that has been read: everything that does not depend on the switches."""

    title: str
    tokens: np.ndarray
    variants: list[Variant]
    hidden: dict[str, Tensor]
    """Hidden states, by the name of the network."""
    ids: np.ndarray
    distances: np.ndarray
    contexts: np.ndarray
    """The tokens before each position, by which exact matches are found (see `reversed_contexts`)."""
    own: range | None = None
    """Ids of the entries of the passage's own document, if the memory holds that."""

    def off(self, rows: slice | int, switches: Switches, entries: Entries) -> np.ndarray:
        """Returns which neighbours of some positions are switched off or forgotten."""
        ids = self.ids[rows]
        dead = (entries.rows(ids) < 0) | np.isin(ids, list(switches.entries))
        return dead | np.isin(entries.live_documents.numbers_of(ids), list(switches.documents))

    def retrieved(self, rows: slice, switches: Switches, memory: Memory) -> Retrieved:
        """Returns what is on; further neighbours move up, as if what is off had been forgotten."""
        entries = memory.entries()
        off = self.off(rows, switches, entries)
        found = Retrieved.from_ids(*drop_neighbours(self.ids[rows], self.distances[rows], off), entries)
        if not any(each.combiner.uses_matches for each in self.variants):
            return found
        return replace(found, matched=self._matched(rows, switches, memory))

    def _matched(self, rows: slice, switches: Switches, memory: Memory) -> Matched:
        """Returns the exact matches that are on; nothing of the passage's own document is found."""
        live, contexts = memory.entries().live_documents, self.contexts[rows]
        view = memory.exact.current().without(live.first_ids[np.isin(live.numbers, list(switches.documents))])
        bounds = (self.own.start, self.own.stop) if self.own else (0, 0)
        excluded = Excluded(*(np.full(len(contexts), bound) for bound in bounds)) if self.own else None
        matched = Matched.of(view.find(contexts, excluded))
        matched.ids[torch.isin(matched.ids, torch.tensor(list(switches.entries), dtype=torch.long))] = MISSING
        return matched


def forgotten_in_split(models: ModelSet, split: HeldOut) -> Bool[np.ndarray, "documents"]:
    """Returns which documents of a split the memory held once and does not hold any more; nothing of them is shown."""
    text = models.corpus.split(split)
    return forgotten_documents(models.memory, source_of_split(models.corpus, split), text.begins)


class PassageReader:
    """Reads passages with every model of a directory, and keeps the last ones."""

    def __init__(self, models: ModelSet):
        self._models = models
        self._kept: OrderedDict[Passage, ReadPassage] = OrderedDict()
        self._entries: Entries | None = None

    @torch.inference_mode()
    def read(self, passage: Passage) -> ReadPassage:
        """Returns a passage, read now or kept from before."""
        if self._entries is not (entries := self._models.memory.entries()):  # new entries may be neighbours
            self._entries = entries
            self._kept.clear()
        if passage in self._kept:
            self._kept.move_to_end(passage)
            return self._kept[passage]
        read = self._read_text(passage) if isinstance(passage, str) else self._read_corpus(passage)
        self._kept[passage] = read
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return read

    def _read_text(self, text: str) -> ReadPassage:
        if len(text) > _MOST_SIGNS:
            raise InputError(f"the text has {len(text):,} signs; give 1 to {LONGEST_PASSAGE:,} tokens")
        stream = stream_of_text(text, _TITLE, self._models.tokeniser)
        if not 0 < len(stream) <= LONGEST_PASSAGE:
            raise InputError(f"the text has {len(stream):,} tokens; give 1 to {LONGEST_PASSAGE:,}")
        variants = self._models.variants()
        networks = {each.network.name: each.network for each in variants}
        states = {name: read_states(network, stream, 0, last=len(stream)) for name, network in networks.items()}
        neighbours = self._models.neighbours_of_text(stream)
        contexts = reversed_contexts(stream, np.arange(len(stream)))
        return ReadPassage(_TITLE, stream.tokens, variants, states, *neighbours, contexts)

    def _read_corpus(self, place: CorpusPassage) -> ReadPassage:
        text = self._models.corpus.split(place.split)
        if not 0 <= place.document < len(text.names):
            raise InputError(f"document {place.document}: {place.split} has {len(text.names):,} documents")
        begin, end = int(text.begins[place.document]), int(text.ends[place.document])
        if forgotten_in_split(self._models, place.split)[place.document]:
            raise InputError(f"document {place.document} of {place.split} was forgotten")
        name = text.names[place.document]
        if not 0 <= place.offset < end - begin:
            raise InputError(f"offset {place.offset}: {name} has {end - begin:,} tokens")
        if not 0 < place.length <= LONGEST_PASSAGE:
            raise InputError(f"length {place.length}: give 1 to {LONGEST_PASSAGE:,}")
        first = begin + place.offset
        rows = np.arange(first, min(end, first + place.length))
        variants = self._models.variants(place.split, first)
        networks = {each.network.name: each.network for each in variants}
        states = {key: read_states(network, text, first, last=int(rows[-1]) + 1) for key, network in networks.items()}
        title = f"{name} ({place.split}), from token {place.offset:,}"
        neighbours = self._models.neighbours_of_split(place.split, rows)
        remembered = self._models.memory.first_id(source_of_split(self._models.corpus, place.split))
        own = None if remembered is None else range(remembered + begin, remembered + end)
        contexts = reversed_contexts(text, rows)
        return ReadPassage(title, text.targets(rows), variants, states, *neighbours, contexts, own)
