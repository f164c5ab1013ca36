"""Paragraphs of a document, found in its tokens: it is divided at blank lines, and long parts are cut."""

from itertools import pairwise

import numpy as np
from jaxtyping import Int, Integer

from spalm.corpus import Tokeniser

_LENGTH = 128
"""Number of tokens of the pieces into which a long part is cut, about."""
_LEAST = 16
"""Number of tokens below which a part, such as a heading, belongs to the one that follows."""
_SLACK = 32
"""Number of tokens by which a cut may be moved to a better place."""
_SENTENCE_ENDS = (".", "!", "?", "。")
"""Signs with which sentences end."""


class ParagraphSplitter:
    """Divides documents of one vocabulary into paragraphs.

    Only tables of the vocabulary are used: no text is decoded. A blank line is two line ends or more with nothing but
    white space between them. A part of less than 16 tokens goes with the next. One of more than 192 is cut into pieces
    of about 128: at the end of a line or of a sentence where there is one near, else at the beginning of a word.
    """

    def __init__(self, tokeniser: Tokeniser):
        texts = ["" if id in tokeniser.end_tokens else tokeniser.spell(id) for id in range(tokeniser.size)]
        self._blank = np.array([not text.strip() for text in texts])
        self._before = np.array([text[: len(text) - len(text.lstrip())].count("\n") for text in texts])
        """Number of line ends before what is visible of a token; of a blank one: all."""
        after = np.array([text[len(text.rstrip()) :].count("\n") for text in texts])
        self._after = np.where(self._blank, 0, after)
        """Number of line ends after what is visible of a token."""
        sentence = np.array([text.rstrip().endswith(_SENTENCE_ENDS) for text in texts])
        self._ends = sentence | (after > 0)
        """Whether a line or a sentence ends with a token."""
        words = bool(tokeniser.separator)
        self._begins = np.array([words or text[:1].isspace() for text in texts])
        """Whether a word begins with a token."""

    def bounds(self, tokens: Integer[np.ndarray, "tokens"]) -> Int[np.ndarray, "paragraphs 2"]:
        """Returns the first token of each paragraph of a document, and the token after its last."""
        starts = self._starts(tokens)
        if not len(starts):
            return np.zeros((0, 2), np.int64)
        places = np.append(_join_short(starts.tolist()), len(tokens))
        better = np.flatnonzero(self._ends[tokens]) + 1, np.flatnonzero(self._begins[tokens])
        cuts = [_cut(int(start), int(end), better) for start, end in pairwise(places)]
        places = np.append(np.concatenate(cuts), len(tokens))
        return np.stack([places[:-1], places[1:]], axis=1)

    def _starts(self, tokens: Integer[np.ndarray, "tokens"]) -> Int[np.ndarray, "parts"]:
        """Returns the first visible token of the document, and those that follow blank lines."""
        blank = self._blank[tokens]
        visible = np.flatnonzero(~blank)
        between = np.cumsum(np.where(blank, self._before[tokens], 0))[visible]
        line_ends = np.diff(between) + self._after[tokens[visible[:-1]]] + self._before[tokens[visible[1:]]]
        return np.concatenate([visible[:1], visible[1:][line_ends >= 2]])


def _join_short(starts: list[int]) -> Int[np.ndarray, "parts"]:
    """Returns where parts begin once each that is short has been joined with the next."""
    kept = starts[:1]
    for start in starts[1:]:
        if start - kept[-1] >= _LEAST:
            kept.append(start)
    return np.array(kept, np.int64)


def _cut(start: int, end: int, better: tuple[np.ndarray, ...]) -> Int[np.ndarray, "pieces"]:
    """Returns where the pieces of a part begin: at one of the `better` places, whose first kinds are preferred."""
    pieces = max(1, round((end - start) / _LENGTH))
    found = [start]
    for number in range(1, pieces):
        place = start + number * (end - start) // pieces
        near = [_nearest(places, place) for places in better]
        found.append(next((each for each in near if each is not None), place))
    return np.array(found, np.int64)


def _nearest(places: Int[np.ndarray, "places"], wanted: int) -> int | None:
    """Returns the place that is nearest to the one that is wanted; None if none is near."""
    first = int(np.searchsorted(places, wanted - _SLACK))
    near = places[first : int(np.searchsorted(places, wanted + _SLACK, side="right"))]
    return int(near[np.abs(near - wanted).argmin()]) if len(near) else None
