"""BM25: paragraphs ranked by the words that they share with a question (Robertson and Zaragoza, 2009).

    score(q, p) = sum over the different words w of q of  idf(w) * f * (k1 + 1) / (f + k1 * (1 - b + b * |p| / mean))
    idf(w)      = ln(1 + (N - n + 0.5) / (n + 0.5))

f is the number of times that w stands in the paragraph p, |p| the number of words of p and `mean` its mean over all
paragraphs; N is the number of paragraphs, n that of those in which w stands. Words are compared in lower case.

The index is a list of segments, each with the postings of some documents sorted by word. An addition makes a new
segment, and neighbouring ones of about the same size are merged, so that a document is moved a few times only. A
removal rewrites the segments that hold the document without it. Words are held as hashes of 64 bits, which Python makes
otherwise in each process; texts are not held.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int, Integer
from pydantic import Field

from spalm.memory import joined_ids
from spalm.settings import Settings

_WORD = re.compile(r"\w+")
_LARGEST_SEGMENT = 1 << 22
"""Number of postings from which on a segment is not merged any more: what merging takes of RAM is bounded by it."""


class Bm25Settings(Settings):
    """Settings of BM25."""

    k1: float = Field(default=1.2, ge=0)
    """How much it counts that a word stands in a paragraph several times; 0: not at all."""
    b: float = Field(default=0.75, ge=0, le=1)
    """How much long paragraphs are held back; 0: not at all, 1: in proportion to their length."""


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Segment:
    """The postings of some paragraphs."""

    places: Int[np.ndarray, "paragraphs 3"]
    """Each paragraph's document, by the id of its first entry, its first token there, and the token after its last."""
    lengths: Integer[np.ndarray, "paragraphs"]
    """Number of words of each paragraph."""
    words: Int[np.ndarray, "words"]
    """Hashes of the different words, rising."""
    bounds: Int[np.ndarray, "bounds"]
    """First posting of each word, and the number of postings."""
    holders: Integer[np.ndarray, "postings"]
    """Paragraph in which the word of a posting stands."""
    counts: Integer[np.ndarray, "postings"]
    """Number of times that it stands there."""

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def of(cls, places: Int[np.ndarray, "paragraphs 3"], words: Sequence[Sequence[str]]) -> "Segment":
        """Returns the segment of paragraphs with these words."""
        lengths = np.array([len(each) for each in words], np.int32)
        hashes = np.fromiter((hash(word) for each in words for word in each), np.int64, int(lengths.sum()))
        holders = np.repeat(np.arange(len(words), dtype=np.int32), lengths)
        order = np.lexsort((holders, hashes))
        hashes, holders = hashes[order], holders[order]
        new = np.append(True, (hashes[1:] != hashes[:-1]) | (holders[1:] != holders[:-1]))[: len(hashes)]
        first = np.flatnonzero(new)
        counts = np.diff(np.append(first, len(hashes))).clip(max=np.iinfo(np.uint16).max).astype(np.uint16)
        return cls._sorted(places, lengths, (hashes[first], holders[first], counts))

    @classmethod
    def merged(cls, segments: "Sequence[Segment]") -> "Segment":
        """Returns one segment with the paragraphs of several."""
        begins = np.cumsum([0, *map(len, segments)])
        hashes = np.concatenate([segment._words_of_postings() for segment in segments])
        holders = np.concatenate([segment.holders + begin for segment, begin in zip(segments, begins.astype(np.int32))])
        counts = np.concatenate([segment.counts for segment in segments])
        order = np.argsort(hashes, kind="stable")
        places, lengths = (np.concatenate(parts) for parts in zip(*((each.places, each.lengths) for each in segments)))
        return cls._sorted(places, lengths, (hashes[order], holders[order], counts[order]))

    def without(self, documents: Int[np.ndarray, "documents"]) -> "Segment":
        """Returns the segment without some documents; itself if it holds none of them."""
        kept = ~np.isin(self.places[:, 0], documents)
        if kept.all():
            return self
        staying = kept[self.holders]
        numbers = (np.cumsum(kept) - 1).astype(np.int32)
        postings = self._words_of_postings()[staying], numbers[self.holders[staying]], self.counts[staying]
        return self._sorted(self.places[kept], self.lengths[kept], postings)

    def in_memory(self, number: int) -> "Segment":
        """Returns the segment with the ids of its documents as those of one of several memories."""
        documents = joined_ids(number, self.places[:, 0])
        return replace(self, places=np.column_stack([documents, self.places[:, 1:]])) if number else self

    def _words_of_postings(self) -> Int[np.ndarray, "postings"]:
        return np.repeat(self.words, np.diff(self.bounds))

    @classmethod
    def _sorted(
        cls, places: np.ndarray, lengths: np.ndarray, postings: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> "Segment":
        """Returns a segment of postings (word, paragraph, count) that are sorted by word."""
        hashes, holders, counts = postings
        first = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
        return cls(places, lengths, hashes[first], np.append(first, len(hashes)), holders, counts)

    def postings_of(self, word: int) -> slice:
        """Returns which postings are those of a word, given by its hash."""
        index = int(np.searchsorted(self.words, word))
        if index == len(self.words) or self.words[index] != word:
            return slice(0, 0)
        return slice(int(self.bounds[index]), int(self.bounds[index + 1]))


class Bm25Index:
    """An index of paragraphs, from which documents can be taken and to which they can be added at any time."""

    def __init__(self, settings: Bm25Settings):
        self._settings = settings
        self.segments: list[Segment] = []

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def add(self, places: Int[np.ndarray, "paragraphs 3"], words: Sequence[Sequence[str]]) -> None:
        """Adds the paragraphs at these places (document, first token, token after the last), which have these words."""
        if not len(places):
            return
        self.segments.append(Segment.of(places, words))
        while len(self.segments) > 1 and self._should_merge(*self.segments[-2:]):
            self.segments[-2:] = [Segment.merged(self.segments[-2:])]

    @staticmethod
    def _should_merge(earlier: Segment, later: Segment) -> bool:
        sizes = len(earlier.holders), len(later.holders)
        return sizes[0] < 2 * sizes[1] and sum(sizes) <= _LARGEST_SEGMENT

    def remove(self, documents: Int[np.ndarray, "documents"]) -> None:
        """Removes the paragraphs of some documents, given by the ids of their first entries."""
        left = [segment.without(documents) for segment in self.segments]
        self.segments = [segment for segment in left if len(segment)]

    def holding(self, word: str) -> int:
        """Returns the number of paragraphs in which a word stands."""
        postings = [segment.postings_of(hash(word)) for segment in self.segments]
        return sum(each.stop - each.start for each in postings)

    def best(self, words: Iterable[str], count: int) -> list[tuple[tuple[int, int, int], float]]:
        """Returns the places of the paragraphs with the highest scores, and the scores, best first.

        Paragraphs that share no word are left out. Of those with equal scores, the earlier ones come first.
        """
        found: list[tuple[tuple[int, int, int], float]] = []
        for segment, scores in zip(self.segments, self.scores(words)):
            chosen = np.flatnonzero(scores > 0)
            if len(chosen) > count:
                least = np.partition(scores[chosen], -count)[-count]
                chosen = chosen[scores[chosen] >= least]
            for number in chosen.tolist():
                first_id, start, end = segment.places[number].tolist()
                found.append(((first_id, start, end), float(scores[number])))
        return sorted(found, key=lambda each: (-each[1], each[0]))[:count]

    def scores(self, words: Iterable[str]) -> list[Float[np.ndarray, "paragraphs"]]:
        """Returns the score of every paragraph, a row for each segment."""
        settings, total = self._settings, len(self)
        scores = [np.zeros(len(segment)) for segment in self.segments]
        mean = max(1, sum(int(segment.lengths.sum()) for segment in self.segments)) / max(1, total)
        relative = [segment.lengths / mean for segment in self.segments]
        held_back = [settings.k1 * (1 - settings.b + settings.b * each) for each in relative]
        for word in dict.fromkeys(words):
            postings = [segment.postings_of(hash(word)) for segment in self.segments]
            holding = self.holding(word)
            weight = math.log(1 + (total - holding + 0.5) / (holding + 0.5))
            for number, each in enumerate(postings):
                segment, holders = self.segments[number], self.segments[number].holders[each]
                counts = segment.counts[each].astype(np.float64)
                scores[number][holders] += weight * counts * (settings.k1 + 1) / (counts + held_back[number][holders])
        return scores
