"""Exact matches: where the longest ends of a text stand word for word in the documents of a memory."""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Int

from spalm.corpus import TokenStream
from spalm.memory.entries import MISSING
from spalm.memory.exact import kernels
from spalm.memory.exact.suffixes import SortedContexts, number_type

LONGEST = 64
"""Number of tokens of a context that are looked for at most."""
LEAST_COUNTS = (1, 8, 64)
"""Least numbers of occurrences: for each, the longest match that stands at so many places is found."""
_LEAST_COUNTS = np.array(LEAST_COUNTS)
OCCURRENCES = 32
"""Number of occurrences of each match that are looked at, at equal distances among all of them."""
_NOTHING = np.zeros(0, np.int64)


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
    contexts = np.empty((count, LONGEST), np.int64)
    kernels.write_last_contexts(numbers, contexts)
    return contexts


class SearchedContexts:
    """Sorted contexts, ready to be searched."""

    def __init__(self, contexts: SortedContexts):
        # One type of each array, whether it is mapped or not: loops are compiled once, and called sooner.
        kinds = number_type(len(contexts.starts) - 2), np.int32, np.int64, np.int64, np.int64, np.int64
        arrays = [_read_only(getattr(contexts, field.name), kind) for field, kind in zip(fields(contexts), kinds)]
        self.contexts = SortedContexts(*arrays)
        self.addresses = [(array.ctypes.data, len(array)) for array in arrays]
        """Address and length of each array."""


def _read_only(array: np.ndarray, kind: type) -> np.ndarray:
    """Returns a plain array of this type that cannot be written to."""
    view = np.require(np.asarray(array), kind, ["C", "A"]).view()
    view.setflags(write=False)
    return view


class SearchedShards:
    """Several shards that one compiled loop searches together."""

    def __init__(self, shards: list[SearchedContexts]):
        self._shards = shards  # keeps the arrays where they are
        addresses = np.array([shard.addresses for shard in shards], np.int64)
        self._addresses = addresses.reshape(len(shards), len(fields(SortedContexts)), 2)
        self._text = shards[0].contexts.text if shards else _read_only(np.zeros(0), np.uint16)

    def find(self, queries: Int[np.ndarray, "n length"], excluded: Excluded | None = None) -> Matches:
        """Returns the matches of some queries."""
        lengths, counts = np.empty((2, len(queries), len(LEAST_COUNTS)), np.int64)
        ids, tokens = np.empty((2, len(queries), len(LEAST_COUNTS), OCCURRENCES), np.int64)
        first, last = (_NOTHING, _NOTHING) if excluded is None else (excluded.first, excluded.last)
        given = self._addresses, self._text, queries, first, last
        kernels.find_matches(*given, _LEAST_COUNTS, MISSING, lengths, counts, ids, tokens)
        return Matches(lengths, counts, ids, tokens)
