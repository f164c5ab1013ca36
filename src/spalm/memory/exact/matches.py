"""Exact matches: where the longest ends of a text stand word for word in the documents of a memory."""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Int

from spalm.corpus import TokenStream
from spalm.memory.entries import MISSING
from spalm.memory.exact import kernels
from spalm.memory.exact.suffixes import SortedContexts

LONGEST = 64
"""Number of tokens of a context that are looked for at most."""
LEAST_COUNTS = (1, 8, 64)
"""Least numbers of occurrences: for each, the longest match that stands at so many places is found."""
_LEAST_COUNTS = np.array(LEAST_COUNTS)
OCCURRENCES = 32
"""Number of occurrences of each match that are looked at, at equal distances among all of them."""


@dataclass(frozen=True)
class Matches:
    """The exact matches of some contexts, longest first: one for each of `LEAST_COUNTS`."""

    lengths: Int[np.ndarray, "n levels"]
    """Number of tokens of each match; 0 where nothing matches."""
    counts: Int[np.ndarray, "n levels"]
    """Number of places where the match stands."""
    ids: Int[np.ndarray, "n levels occurrences"]
    """Entries that follow the match at some of these places, MISSING where there are fewer."""
    tokens: Int[np.ndarray, "n levels occurrences"]
    """Tokens of these entries, MISSING where there are fewer."""

    @classmethod
    def concatenate(cls, parts: "list[Matches]") -> "Matches":
        """Returns the matches of several groups of contexts as those of one."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Excluded:
    """Entries that each query must not find: those with ids first[q] to last[q] - 1."""

    first: Int[np.ndarray, "n"]
    last: Int[np.ndarray, "n"]


def reversed_contexts(
    stream: TokenStream, positions: Int[np.ndarray, "n"], length: int = LONGEST
) -> Int[np.ndarray, "n length"]:
    """Returns the queries of positions of a text: the tokens before each in its document, the last one first."""
    contexts = np.empty((len(positions), length), np.int64)
    begins = stream.begins[stream.documents_of(positions)]
    kernels.write_reversed_contexts(stream.tokens, begins, positions, contexts)
    return contexts


def reversed_context(tokens: list[int]) -> Int[np.ndarray, "1 length"]:
    """Returns the query of the position after a text."""
    return last_contexts(np.array(tokens, np.int64) + 1, 1)


def last_contexts(numbers: Int[np.ndarray, "tokens"], count: int) -> Int[np.ndarray, "count length"]:
    """Returns the queries of the positions after each of the last `count` tokens of a text.

    Every number is one higher than the token's id; 0 is a border, which no match extends across.
    """
    found = np.zeros((count, LONGEST), np.int64)
    for row, end in enumerate(range(len(numbers) - count + 1, len(numbers) + 1)):
        before = numbers[max(0, end - LONGEST) : end]
        found[row, : len(before)] = before[::-1]
    return found


class SearchedContexts:
    """Sorted contexts, ready to be searched."""

    def __init__(self, contexts: SortedContexts):
        # One type of array, whether it is mapped or not: loops are compiled once, and called sooner.
        self.contexts = SortedContexts(*(_read_only(getattr(contexts, field.name)) for field in fields(contexts)))
        self._ends = self.contexts.first_ids + self.contexts.lengths

    def places_before(self, excluded: Excluded) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """Returns the first place, and the one after the last, of what each query must not find.

        These are the places before the excluded entries and, if the last of a document is among them, its end.
        """
        first_ids = self.contexts.first_ids
        document = (np.searchsorted(first_ids, excluded.first, side="right") - 1).clip(0)
        inside = (first_ids[document] <= excluded.first) & (excluded.first < self._ends[document])
        begins = self.contexts.borders[document] + excluded.first - first_ids[document]
        ends = begins + excluded.last - excluded.first + (excluded.last >= self._ends[document])
        return np.where(inside, begins, 0), np.where(inside, ends, 0)


def _read_only(array: np.ndarray) -> np.ndarray:
    """Returns a plain array that cannot be written to."""
    view = np.asarray(array).view()
    view.setflags(write=False)
    return view


def find_matches(
    shards: list[SearchedContexts], queries: Int[np.ndarray, "n length"], excluded: Excluded | None = None
) -> Matches:
    """Returns the matches of some queries in all shards together."""
    count, levels = len(queries), len(LEAST_COUNTS)
    totals, left_out = np.zeros((2, *queries.shape), np.int64)
    nothing = np.zeros(count, np.int64)
    searched = []
    for shard in shards:
        low, high = np.empty((2, *queries.shape), np.int64)
        begin, end = (nothing, nothing) if excluded is None else shard.places_before(excluded)
        held = shard.contexts
        kernels.count_matches(held.text, held.suffixes, held.starts, queries, begin, end, low, high, totals, left_out)
        searched.append((held, low, high, begin, end))
    lengths, filled, counts = np.zeros((3, count, levels), np.int64)
    ids, tokens = np.full((2, count, levels, OCCURRENCES), MISSING, np.int64)
    kernels.choose_lengths(totals, left_out, _LEAST_COUNTS, lengths)
    still_open = np.ones((count, levels), bool)
    while True:
        for held, low, high, begin, end in searched:
            kernels.take_occurrences(
                held.text,
                held.suffixes,
                held.first_ids,
                held.borders,
                low,
                high,
                begin,
                end,
                lengths,
                totals,
                left_out,
                still_open,
                filled,
                ids,
                tokens,
            )
        # A match that stands only at the ends of documents tells nothing: a shorter one is taken.
        if not kernels.shorten_matches(totals, left_out, filled, lengths, counts, still_open):
            return Matches(lengths, counts, ids, tokens)
