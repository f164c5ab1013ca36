"""What every model makes of a passage, token by token, and what becomes of that when parts of the memory are off.

Reading a passage (hidden states, neighbours) is kept for a while, so that switching neighbours off and on costs only
the way from there to the probabilities.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spalm.corpus import Corpus, TokenStream, token_in_text, visible_token
from spalm.errors import InputError
from spalm.lm import LanguageModel, Reading, hidden_states
from spalm.memory import Entries, Memory
from spalm.neighbours import drop_neighbours
from spalm.runs import HeldOut
from spalm.semiparametric import CombinedPrediction, Combiner, PlainCombiner, Retrieved

LONGEST = 2000
"""Tokens of a passage."""
_KEPT = 8
"""Passages that are kept read."""
_ROWS = 256
"""Positions whose distributions over the vocabulary are held at a time."""
_LISTED = 16
"""Neighbours shown of a token."""
_LIKELY = 6
"""Likely tokens shown of each model."""
_BEFORE, _AFTER = 24, 12
"""Tokens shown around the place that a neighbour comes from."""


@dataclass(frozen=True)
class Base:
    """A network, and how it reads. Models that share one read a passage once."""

    name: str
    model: LanguageModel
    reading: Reading


@dataclass(frozen=True)
class Speaker:
    """A model: a network, and the way its memory comes in."""

    name: str
    base: Base
    combiner: Combiner

    @property
    def has_memory(self) -> bool:
        return not isinstance(self.combiner, PlainCombiner)


@dataclass(frozen=True)
class Picked:
    """A passage of the corpus."""

    split: HeldOut
    document: int
    """Its number in the split: names need not differ."""
    offset: int = 0
    """Of its first token in the document."""
    length: int = 400


Passage = str | Picked
"""A text of one's own, or a place in the corpus."""


@dataclass(frozen=True)
class Switches:
    """What is switched off in the memory: entries by their ids, whole documents by their numbers in the memory."""

    entries: frozenset[int] = frozenset()
    documents: frozenset[int] = frozenset()


EVERYTHING_ON = Switches()


@dataclass(frozen=True)
class Read:
    """A passage that has been read: everything that does not depend on the switches."""

    title: str
    tokens: np.ndarray
    speakers: list[Speaker]
    hidden: dict[str, Tensor]
    """By the name of the base."""
    ids: np.ndarray
    distances: np.ndarray


class Explorer:
    """`find` gives the neighbours of every position of a text, `known` those of positions of the corpus: (ids, squared
    distances), nearest first. `speakers` are the models for a passage that begins at a position of a split: what was
    learned from dev is not used on the same part of dev."""

    def __init__(
        self,
        title: str,
        corpus: Corpus,
        memory: Memory,
        speakers: Callable[[HeldOut, int], list[Speaker]],
        find: Callable[[TokenStream], tuple[np.ndarray, np.ndarray]],
        known: Callable[[HeldOut, np.ndarray], tuple[np.ndarray, np.ndarray]],
        device: torch.device,
    ):
        self.title, self.corpus, self.memory, self._speakers = title, corpus, memory, speakers
        self._find, self._known, self._device = find, known, device
        self._reads: OrderedDict[Passage, Read] = OrderedDict()
        self._seen: Entries | None = None
        self._working = Lock()

    # What there is

    def about(self) -> dict[str, Any]:
        held = self.memory.entries()
        return {
            "title": self.title,
            "models": [{"name": each.name, "memory": each.has_memory} for each in self._speakers("test", 0)],
            "between": self.corpus.tokeniser.separator,
            "memory": {"entries": len(held), "documents": len(held.live_documents)},
            "longest": LONGEST,
        }

    def documents(self, split: HeldOut, containing: str, most: int = 200) -> list[dict[str, Any]]:
        """Documents of a split by a part of their names: numbers, names and lengths in tokens."""
        text = self.corpus.split(split)
        wanted = containing.casefold()
        numbers = (number for number, name in enumerate(text.names) if wanted in name.casefold())
        return [
            {"number": number, "name": text.names[number], "tokens": int(text.ends[number] - text.begins[number])}
            for number in islice(numbers, most)
        ]

    # A passage

    def passage(self, passage: Passage, off: Switches = EVERYTHING_ON) -> dict[str, Any]:
        """Every token with its log-probability under every model, with the memory and without it."""
        with self._working:
            read = self._read(passage)
            retrieved = self._retrieved(read, off)
            models = {each.name: self._scores(each, read, retrieved) for each in read.speakers}
        tokeniser = self.corpus.tokeniser
        return {
            "title": read.title,
            "tokens": [token_in_text(tokeniser, token) for token in read.tokens.tolist()],
            "shown": [visible_token(tokeniser, token) for token in read.tokens.tolist()],
            "models": models,
        }

    def token(self, passage: Passage, position: int, off: Switches = EVERYTHING_ON) -> dict[str, Any]:
        """One token: what every model thought likely there, and where its neighbours come from."""
        with self._working:
            read = self._read(passage)
            if not 0 <= position < len(read.tokens):
                raise InputError(f"position {position}: the passage has {len(read.tokens):,} tokens")
            here = self._retrieved(read, off, slice(position, position + 1))
            spoken = {
                each.name: each.combiner.combine(each.base.model, read.hidden[each.base.name][position][None], here)
                for each in read.speakers
            }
            entries = self.memory.entries()
        target = int(read.tokens[position])
        weights = {
            each.name: dict(zip(here.ids[0].tolist(), spoken[each.name].neighbour_weights[0].tolist()))
            for each in read.speakers
            if each.has_memory
        }
        return {
            "shown": visible_token(self.corpus.tokeniser, target),
            "position": position,
            "likely": {name: self._likely(said.log_probabilities[0], target) for name, said in spoken.items()},
            "probability": {
                name: _round(float(said.log_probabilities[0, target].exp())) for name, said in spoken.items()
            },
            "network": {name: _round(float(said.network_share[0])) for name, said in spoken.items()},
            "neighbours": self._neighbours(read, position, target, weights, off, entries),
        }

    def _likely(self, log_probabilities: Tensor, target: int) -> list[dict[str, Any]]:
        """The first choices of a model."""
        best = log_probabilities.topk(min(_LIKELY, len(log_probabilities)))
        return [
            {
                "shown": visible_token(self.corpus.tokeniser, token),
                "probability": _round(math.exp(value)),
                "came": token == target,
            }
            for value, token in zip(best.values.tolist(), best.indices.tolist())
        ]

    def _neighbours(
        self,
        read: Read,
        position: int,
        target: int,
        weights: dict[str, dict[int, float]],
        off: Switches,
        entries: Entries,
    ) -> list[dict[str, Any]]:
        """The nearest that are on, and those before them that are off."""
        found: list[dict[str, Any]] = []
        ids, distances = read.ids[position], read.distances[position]
        dead = self._off(ids, off, entries)
        for id, distance, is_off in zip(ids.tolist(), distances.tolist(), dead.tolist()):
            if entries.source(id) is not None:
                found.append(self._neighbour(entries, id, distance, target, weights, not is_off))
            if sum(each["on"] for each in found) == _LISTED:
                break
        return found

    def _neighbour(
        self, entries: Entries, id: int, distance: float, target: int, weights: dict[str, dict[int, float]], on: bool
    ) -> dict[str, Any]:
        tokeniser, source = self.corpus.tokeniser, entries.source(id)
        assert source is not None
        around = entries.around(id, _BEFORE, _AFTER).tolist()
        own = min(_BEFORE, source.offset)
        return {
            "id": id,
            "shown": visible_token(tokeniser, around[own]),
            "token": token_in_text(tokeniser, around[own]),
            "came": around[own] == target,
            "distance": _round(distance),
            "weights": {name: _round(found.get(id, 0.0)) for name, found in weights.items()},
            "document": source.document,
            "document_number": int(entries.live_documents.numbers_of(np.array(id))),
            "offset": source.offset,
            "before": tokeniser.decode(around[:own]),
            "after": tokeniser.decode(around[own + 1 :]),
            "on": on,
        }

    def _scores(self, speaker: Speaker, read: Read, retrieved: Retrieved) -> dict[str, list[float]]:
        model, hidden = speaker.base.model, read.hidden[speaker.base.name]
        targets = torch.from_numpy(read.tokens).to(hidden.device)
        found: dict[str, list[Tensor]] = {"log_probabilities": [], "network": []}
        for rows in torch.arange(len(targets)).split(_ROWS):
            said: CombinedPrediction = speaker.combiner.combine(model, hidden[rows], retrieved[rows])
            found["log_probabilities"].append(said.log_probabilities.gather(-1, targets[rows, None])[:, 0])
            found["network"].append(said.network_share)
        scores = {name: _rounded(torch.cat(parts)) for name, parts in found.items()}
        if not speaker.has_memory:
            return {"log_probabilities": scores["log_probabilities"]}
        alone = [
            model.target_log_probabilities(hidden[rows], targets[rows])
            for rows in torch.arange(len(targets)).split(_ROWS)
        ]
        return {**scores, "without_memory": _rounded(torch.cat(alone))}

    def _retrieved(self, read: Read, off: Switches, rows: slice = slice(None)) -> Retrieved:
        """The neighbours as the switches leave them: what is off makes room for the next, as if it were forgotten."""
        entries = self.memory.entries()
        ids, distances = read.ids[rows], read.distances[rows]
        ids, distances = drop_neighbours(ids, distances, self._off(ids, off, entries))
        return Retrieved.from_ids(ids, distances, entries).to(self._device)

    def _off(self, ids: np.ndarray, off: Switches, entries: Entries) -> np.ndarray:
        """Which entries are switched off, or forgotten."""
        dead = (entries.rows(ids) < 0) | np.isin(ids, list(off.entries))
        return dead | np.isin(entries.live_documents.numbers_of(ids), list(off.documents))

    @torch.inference_mode()
    def _read(self, passage: Passage) -> Read:
        if self._seen is not (entries := self.memory.entries()):  # what is new there may be a neighbour
            self._seen = entries
            self._reads.clear()
        if passage in self._reads:
            self._reads.move_to_end(passage)
            return self._reads[passage]
        read = self._read_own(passage) if isinstance(passage, str) else self._read_picked(passage)
        self._reads[passage] = read
        if len(self._reads) > _KEPT:
            self._reads.popitem(last=False)
        return read

    def _read_own(self, text: str) -> Read:
        try:
            tokens = self.corpus.tokeniser.encode([text.encode()])[0].astype(np.int64)
        except UnicodeEncodeError as error:
            raise InputError(f"the text is no Unicode (sign {error.start}); give it as UTF-8") from None
        if not 0 < len(tokens) <= LONGEST:
            raise InputError(f"the text has {len(tokens):,} tokens; give 1 to {LONGEST:,}")
        stream = TokenStream(tokens, np.array([len(tokens)]), lambda: ["own text"], self.corpus.tokeniser.start)
        speakers = self._speakers("test", 0)
        return Read("own text", tokens, speakers, self._hidden(speakers, stream, 0, len(tokens)), *self._find(stream))

    def _read_picked(self, picked: Picked) -> Read:
        text = self.corpus.split(picked.split)
        if not 0 <= picked.document < len(text.names):
            raise InputError(f"document {picked.document}: {picked.split} has {len(text.names):,} documents")
        begin, end = int(text.begins[picked.document]), int(text.ends[picked.document])
        name = text.names[picked.document]
        if not 0 <= picked.offset < end - begin:
            raise InputError(f"offset {picked.offset}: {name} has {end - begin:,} tokens")
        if not 0 < picked.length <= LONGEST:
            raise InputError(f"length {picked.length}: give 1 to {LONGEST:,}")
        first = begin + picked.offset
        rows = np.arange(first, min(end, first + picked.length))
        speakers = self._speakers(picked.split, first)
        hidden = self._hidden(speakers, text, first, int(rows[-1]) + 1)
        title = f"{name} ({picked.split}), from token {picked.offset:,}"
        return Read(title, text.targets(rows), speakers, hidden, *self._known(picked.split, rows))

    def _hidden(self, speakers: list[Speaker], stream: TokenStream, first: int, last: int) -> dict[str, Tensor]:
        """h of the positions from `first` to `last`, read as the run reads them, with everything that comes before."""
        found = {}
        for base in {each.base.name: each.base for each in speakers}.values():
            start = first // base.reading.stride * base.reading.stride
            hidden = torch.zeros(last - first, base.model.width, device=self._device)
            for positions, states in hidden_states(base.model, stream, base.reading, range(start, last)):
                wanted = positions >= first
                hidden[positions[wanted] - first] = states[torch.from_numpy(wanted)].float()
            found[base.name] = hidden
        return found


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _rounded(values: Tensor) -> list[float]:
    return [_round(value) for value in values.tolist()]
