"""The sorted contexts of some documents: the text, and a suffix array of it read backwards.

The text has a border before each document, and every token is one higher than its id, so that the border can be 0:

    text       0 a b c 0 b c d       documents "a b c" and "b c d"
    suffixes   places of all tokens, sorted by the text that ends there, read from its last token backwards

So the places where any piece of text ends are next to each other in `suffixes`: they are found by binary search, and
the token at the place after each of them is what followed. A border is lower than every token, hence nothing that is
looked for extends across it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Integer, UInt
from pydivsufsort import divsufsort

from spalm.errors import DamagedError

BORDER = 0
"""Number before each document in the text."""


@dataclass(frozen=True)
class SortedContexts:
    """Some documents and the order of all their contexts."""

    text: UInt[np.ndarray, "places"]
    """Tokens, each one higher than its id, with a border before each document."""
    suffixes: Int[np.ndarray, "tokens"]
    """Places of all tokens, sorted by the text before and at them, read backwards."""
    first_ids: Int[np.ndarray, "documents"]
    """Id of each document's first entry, rising."""
    borders: Int[np.ndarray, "documents"]
    """Place of the border before each document."""
    lengths: Int[np.ndarray, "documents"]
    """Number of entries of each document."""
    starts: Int[np.ndarray, "vocabulary_and_two"]
    """First of the suffixes that end with each number of the text or a higher one."""

    def refuse_unless_plausible(self, vocabulary: int) -> None:
        """Raises an error unless the arrays fit each other, so that no search reads beyond their ends."""
        places = np.concatenate([[0], np.cumsum(self.lengths + 1)])
        plausible = (
            len(self.starts) == vocabulary + 2
            and len(self.first_ids) == len(self.borders) == len(self.lengths)
            and (self.lengths >= 0).all()
            and np.array_equal(places[:-1], self.borders)
            and places[-1] == len(self.text) == len(self.suffixes) + len(self.borders)
            and self.starts[0] == 0
            and (np.diff(self.starts) >= 0).all()
            and self.starts[-1] <= len(self.suffixes)
        )
        if not plausible:
            raise DamagedError("sorted contexts are damaged: their arrays do not fit each other")

    def ids_at(self, places: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the ids of the entries at some places, which must not be borders."""
        document = np.searchsorted(self.borders, places, side="right") - 1
        return self.first_ids[document] + places - self.borders[document] - 1

    def places_of(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the place of each entry, which must be in one of the documents."""
        document = np.searchsorted(self.first_ids, ids, side="right") - 1
        return self.borders[document] + 1 + ids - self.first_ids[document]

    def only(self, documents: Bool[np.ndarray, "documents"]) -> "SortedContexts":
        """Returns the same with some of its documents only; their text stays where it is."""
        kept = np.repeat(documents, self.lengths + 1)
        suffixes = self.suffixes[kept[self.suffixes]]
        first_ids, borders, lengths = (array[documents] for array in (self.first_ids, self.borders, self.lengths))
        starts = _starts(self.text[kept], len(self.starts))
        return SortedContexts(self.text, suffixes, first_ids, borders, lengths, starts)


def sort_contexts(
    tokens: Integer[np.ndarray, "tokens"],
    lengths: Int[np.ndarray, "documents"],
    first_ids: Int[np.ndarray, "documents"],
    *,
    vocabulary: int,
) -> SortedContexts:
    """Sorts the contexts of documents, given their tokens in a row and the number of tokens of each."""
    borders = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]).astype(np.int64)
    text = np.zeros(len(tokens) + len(lengths), number_type(vocabulary))
    inside = np.ones(len(text), bool)
    inside[borders] = False
    text[inside] = tokens
    text[inside] += 1
    suffixes = divsufsort(np.ascontiguousarray(text[::-1]))[len(lengths) :]  # those of borders come first
    np.subtract(len(text) - 1, suffixes, out=suffixes)
    starts = _starts(text, vocabulary + 2)
    return SortedContexts(text, suffixes, first_ids.astype(np.int64), borders, lengths.astype(np.int64), starts)


def number_type(vocabulary: int) -> type:
    """Returns the type of the numbers of a text."""
    return np.uint16 if vocabulary < 1 << 16 else np.uint32


def _starts(text: UInt[np.ndarray, "places"], count: int) -> Int[np.ndarray, "count"]:
    """Returns the number of tokens in a text that are lower than each of the numbers 0 to `count` - 1."""
    counts = np.bincount(text, minlength=count)
    counts[BORDER] = 0
    return np.cumsum(counts) - counts
