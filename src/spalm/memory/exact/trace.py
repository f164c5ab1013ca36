"""Tracing: every span of a text that stands word for word in the documents of a memory."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Integer

from spalm.choices import LEAST_SPAN
from spalm.memory.exact import kernels
from spalm.memory.exact.matches import SearchedContexts

LEAST = LEAST_SPAN
"""Number of tokens of the shortest span that is reported, unless another is asked for."""
_PLACES = 5
"""Number of places that are named for a span at most."""
NO_DOCUMENTS = np.zeros(0, np.int64)
"""No documents at all, by the ids of their first entries."""


@dataclass(frozen=True)
class VerbatimSpan:
    """A span of a text that stands in the memory, and is part of no longer one that does."""

    start: int
    """First token of the span."""
    end: int
    """Token after the last of the span."""
    count: int
    """Number of places where the span stands in the memory."""
    ids: Int[np.ndarray, "places"]
    """Entries of the span's first token at some of these places, by rising id."""

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class _Occurrences:
    """The suffixes of one shard at which a span ends."""

    shard: SearchedContexts
    low: int
    high: int

    def ends(self, left_out: Int[np.ndarray, "documents"]) -> tuple[int, Int[np.ndarray, "places"]]:
        """Returns the number of places outside of some documents, and some of them, at equal distances."""
        contexts = self.shard.contexts
        if not len(left_out):
            chosen = _spread(self.high - self.low)
            return self.high - self.low, contexts.suffixes[self.low + chosen].astype(np.int64)
        places = np.asarray(contexts.suffixes[self.low : self.high], np.int64)
        document = np.searchsorted(contexts.borders, places, side="right") - 1
        places = places[~np.isin(contexts.first_ids[document], left_out)]
        return len(places), places[_spread(len(places))]


def _spread(count: int) -> Int[np.ndarray, "chosen"]:
    """Returns some of the numbers 0 to `count` - 1, at equal distances."""
    return np.linspace(0, count - 1, min(count, _PLACES)).astype(np.int64)


def find_spans(
    shards: list[SearchedContexts],
    tokens: Integer[np.ndarray, "tokens"],
    least: int = LEAST,
    *,
    left_out: Int[np.ndarray, "documents"] = NO_DOCUMENTS,
) -> list[VerbatimSpan]:
    """Returns the spans of at least `least` tokens that stand in the shards and cannot be made longer, longest first.

    Spans may overlap, but none contains another. Documents of `left_out`, given by the ids of their first entries, are
    not searched.
    """
    query = tokens.astype(np.int64) + 1
    found: dict[tuple[int, int], list[_Occurrences]] = defaultdict(list)
    for shard in shards:
        held = shard.contexts
        begins, ends = _places_of(shard, left_out)
        for start, end, low, high in kernels.maximal_spans(
            held.text, held.suffixes, held.starts, query, begins, ends
        ).tolist():
            if end - start >= least:
                found[start, end].append(_Occurrences(shard, low, high))
    # A span that is maximal in all shards together is maximal in each that holds it, so all its places are listed.
    spans = [_join(span, found[span], left_out) for span in _not_contained(found)]
    return sorted(spans, key=lambda span: (-len(span), span.start))


def _places_of(
    shard: SearchedContexts, documents: Int[np.ndarray, "documents"]
) -> tuple[Int[np.ndarray, "own"], Int[np.ndarray, "own"]]:
    """Returns the first place of each of some documents that are in a shard, and the one after its last."""
    own = np.flatnonzero(np.isin(shard.contexts.first_ids, documents))
    begins = shard.contexts.borders[own] + 1
    return begins, begins + shard.contexts.lengths[own]


def _not_contained(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the spans that are part of no other, in reading order."""
    kept: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not kept or end > kept[-1][1]:
            kept.append((start, end))
    return kept


def _join(
    span: tuple[int, int], occurrences: list[_Occurrences], left_out: Int[np.ndarray, "documents"]
) -> VerbatimSpan:
    """Returns a span with its places in all shards."""
    start, end = span
    count, ids = 0, []
    for each in occurrences:
        here, places = each.ends(left_out)
        count += here
        ids.append(each.shard.contexts.ids_at(places - (end - start - 1)))
    every = np.sort(np.concatenate(ids))
    return VerbatimSpan(start, end, count, every[_spread(len(every))])
