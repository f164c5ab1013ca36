"""Every model's predictions of a passage, token by token, with parts of the memory switched off on request."""

import math
from dataclasses import asdict, dataclass
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spalm.corpus import token_in_text, visible_token
from spalm.errors import InputError
from spalm.generation.inspection.passages import (
    EVERYTHING_ON,
    LONGEST_PASSAGE,
    Passage,
    PassageReader,
    ReadPassage,
    Switches,
    forgotten_in_split,
)
from spalm.generation.models import ModelSet
from spalm.generation.score import score_variant
from spalm.generation.trace import sources_of
from spalm.memory import Entries
from spalm.memory.exact import LEAST
from spalm.runs import HeldOut
from spalm.semiparametric import Matched

_LISTED = 16
"""Number of neighbours shown for a token."""
_PLACES = 4
"""Number of places shown for an exact match."""
_LIKELY = 6
"""Number of likely tokens shown for each model."""
_BEFORE, _AFTER = 24, 12
"""Numbers of tokens shown before and after the token that followed a neighbour."""


@dataclass(frozen=True)
class _Target:
    """A position that is explained: its actual token, and the weights in the memory's share by model and entry."""

    token: int
    weights: dict[str, dict[int, float]]


class Explorer:
    """Explains passages in plain JSON values, one passage at a time."""

    def __init__(self, models: ModelSet):
        self.models = models
        self._reader = PassageReader(models)
        self._working = Lock()

    def about(self) -> dict[str, Any]:
        """Returns an overview: the models, and the size of the memory."""
        entries = self.models.memory.entries()
        return {
            "title": self.models.title,
            "models": [{"name": each.name, "memory": each.has_memory} for each in self.models.variants()],
            "between": self.models.tokeniser.separator,
            "memory": {"entries": len(entries), "documents": len(entries.live_documents)},
            "longest": LONGEST_PASSAGE,
        }

    def documents(self, split: HeldOut, containing: str, most: int = 200) -> list[dict[str, Any]]:
        """Returns documents of a split by a part of their names: numbers, names and lengths in tokens."""
        text = self.models.corpus.split(split)
        wanted = containing.casefold()
        gone = forgotten_in_split(self.models, split)
        numbers = (number for number, name in enumerate(text.names) if wanted in name.casefold() and not gone[number])
        return [
            {"number": number, "name": text.names[number], "tokens": int(text.ends[number] - text.begins[number])}
            for number in islice(numbers, most)
        ]

    def passage(self, passage: Passage, off: Switches = EVERYTHING_ON) -> dict[str, Any]:
        """Returns every token with its log-probability under every model, with the memory and without it."""
        with self._working:
            read = self._reader.read(passage)
            models = self._scores(read, off)
        tokeniser = self.models.tokeniser
        return {
            "title": read.title,
            "tokens": [token_in_text(tokeniser, token) for token in read.tokens.tolist()],
            "shown": [visible_token(tokeniser, token) for token in read.tokens.tolist()],
            "models": models,
        }

    def trace(self, passage: Passage, off: Switches = EVERYTHING_ON) -> dict[str, Any]:
        """Returns the spans of a passage that stand word for word in other documents of the memory, longest first."""
        with self._working:
            read = self._reader.read(passage)
        entries = self.models.memory.entries()
        live = entries.live_documents
        own = [] if read.own is None else [read.own.start]
        left_out = np.concatenate([live.first_ids[np.isin(live.numbers, list(off.documents))], np.array(own, np.int64)])
        spans = self.models.memory.exact.current().trace(read.tokens, LEAST, left_out)
        return {
            "least": LEAST,
            "spans": [
                {
                    "start": span.start,
                    "end": span.end,
                    "count": span.count,
                    "sources": [asdict(source) for source in sources_of(span, entries)],
                }
                for span in spans
            ],
        }

    def _scores(self, read: ReadPassage, off: Switches) -> dict[str, dict[str, list[float]]]:
        """Returns the scores of every token, by model and kind of score."""
        device = self.models.device
        retrieved = read.retrieved(slice(None), off, self.models.memory).to(device)
        targets = torch.from_numpy(read.tokens).to(device)
        found = {}
        for variant in read.variants:
            scores = score_variant(variant, read.hidden[variant.network.name], targets, retrieved=retrieved)
            found[variant.name] = {"log_probabilities": _rounded(scores.log_probabilities)}
            if variant.has_memory:
                found[variant.name]["network"] = _rounded(scores.network)
                found[variant.name]["without_memory"] = _rounded(scores.without_memory)
        return found

    @torch.inference_mode()
    def token(self, passage: Passage, position: int, off: Switches = EVERYTHING_ON) -> dict[str, Any]:
        """Returns what every model thought likely at one token, and where its neighbours and matches come from."""
        with self._working:
            read = self._reader.read(passage)
            if not 0 <= position < len(read.tokens):
                raise InputError(f"position {position}: the passage has {len(read.tokens):,} tokens")
            entries, rows = self.models.memory.entries(), slice(position, position + 1)
            here = read.retrieved(rows, off, self.models.memory).to(self.models.device)
            combined = {
                each.name: each.combiner.combine(each.network.model, read.hidden[each.network.name][rows], here)
                for each in read.variants
            }
        weights = {
            each.name: {id: weight for id, _, weight in combined[each.name].proposals(here)}
            for each in read.variants
            if each.has_memory
        }
        target = _Target(int(read.tokens[position]), weights)
        return {
            "shown": visible_token(self.models.tokeniser, target.token),
            "position": position,
            "likely": {name: self._likely(each.log_probabilities[0], target) for name, each in combined.items()},
            "probability": {
                name: _round(float(each.log_probabilities[0, target.token].exp())) for name, each in combined.items()
            },
            "network": {name: _round(float(each.network_share[0])) for name, each in combined.items()},
            "neighbours": self._neighbours(read, position, target, off=off, entries=entries),
            "matches": [] if here.matched is None else self._matches(read, position, here.matched, target=target),
        }

    def _likely(self, log_probabilities: Tensor, target: _Target) -> list[dict[str, Any]]:
        """Returns a model's likeliest tokens."""
        best = log_probabilities.topk(min(_LIKELY, len(log_probabilities)))
        return [
            {
                "shown": visible_token(self.models.tokeniser, token),
                "probability": _round(math.exp(value)),
                "came": token == target.token,
            }
            for value, token in zip(best.values.tolist(), best.indices.tolist())
        ]

    def _neighbours(
        self, read: ReadPassage, position: int, target: _Target, *, off: Switches, entries: Entries
    ) -> list[dict[str, Any]]:
        """Returns the nearest neighbours that are on, and the nearer ones that are off."""
        found: list[dict[str, Any]] = []
        columns = read.ids[position], read.distances[position], read.off(position, off, entries)
        for id, distance, is_off in zip(*(column.tolist() for column in columns)):
            if entries.source(id) is not None:
                found.append({**self._neighbour(entries, id, target), "distance": _round(distance), "on": not is_off})
            if sum(each["on"] for each in found) == _LISTED:
                break
        return found

    def _matches(self, read: ReadPassage, position: int, matched: Matched, *, target: _Target) -> list[dict[str, Any]]:
        """Returns the exact matches of a position, longest first: their text, and some places where it stands."""
        entries, found = self.models.memory.entries(), []
        lengths, counts = matched.lengths[0].int().tolist(), matched.counts[0].int().tolist()
        for level, (length, count) in enumerate(zip(lengths, counts)):
            ids = matched.ids[0, level][matched.present[0, level]].tolist()
            if not ids or length in lengths[:level]:
                continue
            context = read.contexts[position, :length][::-1] - 1
            found.append(
                {
                    "length": length,
                    "count": count,
                    "text": self.models.tokeniser.decode(context.tolist()),
                    "places": [{**self._neighbour(entries, id, target), "on": True} for id in ids[:_PLACES]],
                }
            )
        return found

    def _neighbour(self, entries: Entries, id: int, target: _Target) -> dict[str, Any]:
        """Returns an entry with its weights, its document and the text around it."""
        tokeniser, source = self.models.tokeniser, entries.source(id)
        assert source is not None
        around = entries.around(id, _BEFORE, _AFTER).tolist()
        own = min(_BEFORE, source.offset)
        return {
            "id": id,
            "shown": visible_token(tokeniser, around[own]),
            "token": token_in_text(tokeniser, around[own]),
            "came": around[own] == target.token,
            "weights": {name: _round(found.get(id, 0.0)) for name, found in target.weights.items()},
            "document": source.document,
            "document_number": int(entries.live_documents.numbers_of(np.array(id))),
            "offset": source.offset,
            "before": tokeniser.decode(around[:own]),
            "after": tokeniser.decode(around[own + 1 :]),
        }


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _rounded(values: Tensor) -> list[float]:
    return [_round(value) for value in values.tolist()]
