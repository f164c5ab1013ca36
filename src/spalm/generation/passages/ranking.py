"""The paragraphs of a memory, ranked for a question.

The index is made of the live documents when it is first asked, and follows the memory from then on: at each question,
documents that were added since are added, and those that were forgotten are taken out. It is in RAM only. It holds
hashes of words and places, from which the text is read from the memory when it is wanted; so nothing of a forgotten
document stays, on the disk or in RAM.

Ranking by something else than BM25, or ranking the best by BM25 again, would go into `rank_together`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from spalm.choices import MOST_PASSAGES
from spalm.console import say
from spalm.corpus import Tokeniser
from spalm.errors import InputError
from spalm.generation.passages.bm25 import Bm25Index, Bm25Settings, Segment, words_of
from spalm.generation.passages.paragraphs import ParagraphSplitter
from spalm.memory import Entries, Memory, divided_id

_BROKEN = "\ufffd"
"""Replacement character, in place of bytes of a character that was cut."""
_QUESTION_WORDS = 256
"""Number of words at the end of a text by which paragraphs are ranked."""
_FEW, _FEW_SHARE = 3, 10
"""A word tells something if it stands in at most so many paragraphs, or in at most one of so many."""
_GROUP_TOKENS = 1 << 18
"""Number of tokens of documents that are added together."""
_MANY_TOKENS = 1 << 20
"""Number of new tokens from which on it is said that they are being indexed."""


@dataclass(frozen=True)
class RankedPassage:
    """A paragraph of the memory, and how well it fits a question."""

    document: str
    """Name of the document."""
    offset: int
    """First token of the paragraph in the document."""
    tokens: int
    """Number of tokens of the paragraph."""
    text: str
    score: float
    """Score of the paragraph by BM25."""
    memory: str = ""
    """Name of the memory that holds the document."""


def refuse_passage_count(count: int) -> None:
    """Raises an error unless so many passages may be asked for."""
    if not 0 <= count <= MOST_PASSAGES:
        raise InputError(f"passages = {count}: give 0 to {MOST_PASSAGES}")


class PassageIndex:
    """Ranks the paragraphs of a memory. It may be asked by several threads, while others change the memory."""

    def __init__(self, memory: Memory, tokeniser: Tokeniser, settings: Bm25Settings | None = None):
        self._memory, self._tokeniser, self._settings = memory, tokeniser, settings or Bm25Settings()
        self._index = Bm25Index(self._settings)
        self._held = np.zeros(0, np.int64)
        """The documents in the index, by the ids of their first entries."""
        self._entries: Entries | None = None
        """The entries that the index agrees with."""
        self._splitter: ParagraphSplitter | None = None
        self._asking = Lock()

    def __len__(self) -> int:
        return len(self._index)

    def best(self, text: str, count: int) -> list[RankedPassage]:
        """Returns the paragraphs that fit a text best, the best first; fewer if fewer share a word with it."""
        return rank_together([("", self)], text, count)

    def current(self) -> "IndexedParagraphs":
        """Returns the paragraphs of the documents that the memory holds now."""
        with self._asking:
            while True:
                entries = self._memory.entries()
                try:
                    self._follow(entries)
                    return IndexedParagraphs(self, entries, tuple(self._index.segments))
                except (InputError, OSError):
                    # Another process may have removed a shard since the entries were listed.
                    if self._memory.entries() is entries:
                        raise

    def has_changed_since(self, entries: Entries) -> bool:
        """Returns whether the memory holds other documents, or holds them elsewhere, than these entries say."""
        return self._memory.entries() is not entries

    @property
    def settings(self) -> Bm25Settings:
        """Settings of the ranking."""
        return self._settings

    def passage_at(self, entries: Entries, first_id: int, bounds: tuple[int, int], *, score: float) -> RankedPassage:
        """Returns a paragraph, given by the id of its document's first entry and its bounds there."""
        live, row, (start, end) = entries.live_documents, entries.first_row(first_id), bounds
        paragraph = self._decode(entries.tokens(row + start, row + end))
        name = live.names[int(live.index_of(np.array(first_id)))]
        return RankedPassage(name, start, end - start, paragraph, score)

    def holding(self, words: Sequence[str]) -> list[int]:
        """Returns for every word, in lower case, the number of paragraphs in which it stands."""
        with self._asking:
            return [self._index.holding(word) for word in words]

    def _decode(self, tokens: np.ndarray) -> str:
        """Returns tokens as text, without those that end a document or an answer."""
        ends = self._tokeniser.end_tokens
        return self._tokeniser.decode([token for token in tokens.tolist() if token not in ends]).strip(_BROKEN).strip()

    def _follow(self, entries: Entries) -> None:
        """Takes forgotten documents out of the index, and adds new ones."""
        if entries is self._entries:
            return
        live = entries.live_documents
        current = live.first_ids[live.entries > 0]
        gone = self._held[~np.isin(self._held, current)]
        if len(gone):
            self._index.remove(gone)
            self._held = self._held[np.isin(self._held, current)]
        new = np.flatnonzero((live.entries > 0) & ~np.isin(live.first_ids, self._held))
        if (total := int(live.entries[new].sum())) > _MANY_TOKENS:
            say(f"{self._memory.directory}: {total:,} tokens are divided into paragraphs, once in this process")
        groups = np.cumsum(live.entries[new]) // _GROUP_TOKENS
        for group in np.split(new, np.flatnonzero(np.diff(groups)) + 1):
            self._add(entries, group)
        self._entries = entries

    def _add(self, entries: Entries, documents: np.ndarray) -> None:
        """Adds documents to the index, given by their places among the live ones."""
        if self._memory.vocabulary > self._tokeniser.size:
            raise InputError(
                f"{self._memory.directory} has {self._memory.vocabulary:,} tokens in its vocabulary, its tokeniser has "
                f"{self._tokeniser.size:,}; restore the corpus beside it from a copy"
            )
        if self._splitter is None:
            self._splitter = ParagraphSplitter(self._tokeniser)
        live = entries.live_documents
        places, words = [np.zeros((0, 3), np.int64)], []
        for number in documents.tolist():
            first_id = int(live.first_ids[number])
            row = entries.first_row(first_id)
            tokens = entries.tokens(row, row + int(live.entries[number]))
            bounds = self._splitter.bounds(tokens)
            places.append(np.insert(bounds, 0, first_id, axis=1))
            words += [words_of(self._decode(tokens[start:end])) for start, end in bounds.tolist()]
        self._index.add(np.concatenate(places), words)
        self._held = np.append(self._held, live.first_ids[documents])


@dataclass(frozen=True)
class IndexedParagraphs:
    """The paragraphs of the documents that a memory held at one moment."""

    index: PassageIndex
    entries: Entries
    segments: tuple[Segment, ...]


def rank_together(indexes: Sequence[tuple[str, PassageIndex]], text: str, count: int) -> list[RankedPassage]:
    """Returns the paragraphs of several memories, given by their names, that fit a text best, the best first.

    They are ranked as if one memory held all of them: how rare a word is, and how long paragraphs are, is counted in
    all together.
    """
    refuse_passage_count(count)
    if not count or not indexes:
        return []
    while True:
        held = [index.current() for _, index in indexes]
        try:
            return _rank([name for name, _ in indexes], held, text, count=count)
        except (InputError, OSError):
            # Another process may have removed a shard since the entries were listed.
            if not any(each.index.has_changed_since(each.entries) for each in held):
                raise


def tell_something(indexes: Sequence[PassageIndex], words: Sequence[str]) -> list[bool]:
    """Returns for every word, in lower case, whether it stands in few of the paragraphs of all these indexes."""
    few = max(_FEW, sum(map(len, indexes)) // _FEW_SHARE)
    return [sum(counts) <= few for counts in zip(*(index.holding(words) for index in indexes), strict=True)]


def _rank(names: Sequence[str], held: Sequence[IndexedParagraphs], text: str, *, count: int) -> list[RankedPassage]:
    joined = Bm25Index(held[0].index.settings)
    for number, each in enumerate(held):
        joined.segments += [segment.in_memory(number) for segment in each.segments]
    found = []
    for (document, start, end), score in joined.best(words_of(text)[-_QUESTION_WORDS:], count):
        number, first_id = divided_id(document)
        each = held[number]
        passage = each.index.passage_at(each.entries, first_id, (start, end), score=score)
        found.append(replace(passage, memory=names[number]))
    return found
