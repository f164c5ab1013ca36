"""Parts of an answer that stand word for word in a passage of its prompt: they come from there.

Words are compared in lower case, and signs between them do not count. A part is cited if it has three words or is half
of the answer, and has a word that tells something: one that stands in few paragraphs of the memory. What stands in
several passages comes from the one in which more of the words around it stand, and then from the one that ranks higher.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spalm.generation.answer import Citation, CitedSource
from spalm.generation.passages.ranking import RankedPassage

_WORD = re.compile(r"\w+")
_LEAST = 3
"""Number of words from which on a part is cited, even if it is a small share of the answer."""
_SOURCES = 3
"""Highest number of sources named for a citation."""


@dataclass(frozen=True)
class _Words:
    """The words of a text in lower case, and where they stand."""

    words: list[str]
    spans: list[tuple[int, int]]

    @classmethod
    def of(cls, text: str) -> "_Words":
        found = list(_WORD.finditer(text))
        return cls([match[0].lower() for match in found], [match.span() for match in found])


@dataclass(frozen=True)
class _Run:
    """Words in a row of an answer that stand in a passage."""

    first: int
    """Number of the first word in the answer."""
    length: int
    place: int
    """Number of the first word in the passage."""


def copied_parts(
    answer: str,
    passages: Sequence[RankedPassage],
    *,
    telling: Callable[[list[str]], list[bool]],
    count_tokens: Callable[[str], int],
) -> list[Citation]:
    """Returns the parts of an answer that were copied from passages, given best first.

    `telling` says of words whether they stand in few paragraphs; `count_tokens` returns the number of tokens of a text.
    """
    words, sources = _Words.of(answer), [_Words.of(passage.text) for passage in passages]
    known = dict(zip(words.words, telling(words.words)))
    runs = [_longest_runs(words.words, source.words) for source in sources]
    found, at = [], 0
    while at < len(words.words):
        chosen = _best(runs, at)
        if chosen is None or not _is_cited(words.words[at : at + runs[chosen][at].length], len(words.words), known):
            at += 1
            continue
        length = runs[chosen][at].length
        start, end = words.spans[at][0], words.spans[at + length - 1][1]
        tokens = float(count_tokens(answer[start:end]))
        cited = []
        for number in sorted(range(len(passages)), key=lambda number: (number != chosen, number)):
            run = runs[number].get(at)
            if run is not None and run.length == length:
                before = passages[number].text[: sources[number].spans[run.place][0]]
                offset = passages[number].offset + count_tokens(before)
                cited.append(CitedSource(passages[number].document, offset, tokens, passages[number].memory))
        found.append(Citation(start, end, cited[:_SOURCES]))
        at += length
    return found


def _longest_runs(words: list[str], source: list[str]) -> dict[int, _Run]:
    """Returns, for every word of an answer that stands in a source, the longest run that begins with it."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, word in enumerate(source):
        places[word].append(place)
    lengths: dict[int, int] = {}
    """Length of the run from the word after the one at hand on, by its place in the source."""
    found = {}
    for number in reversed(range(len(words))):
        lengths = {place: 1 + lengths.get(place + 1, 0) for place in places.get(words[number], [])}
        if lengths:
            place = max(lengths, key=lambda place: (lengths[place], -place))
            found[number] = _Run(number, lengths[place], place)
    return found


def _best(runs: list[dict[int, _Run]], at: int) -> int | None:
    """Returns the number of the passage with the longest run from a word on; None if it stands in none.

    Of several with runs as long, the one in which most words of the answer stand comes first, then the best.
    """
    lengths = [run[at].length if at in run else 0 for run in runs]
    if not any(lengths):
        return None
    return max(range(len(runs)), key=lambda number: (lengths[number], len(runs[number]), -number))


def _is_cited(part: list[str], words: int, telling: dict[str, bool]) -> bool:
    """Returns whether a part of an answer of so many words is long enough, and tells something."""
    return (len(part) >= _LEAST or 2 * len(part) >= words) and any(telling[word] for word in part)


def with_copied_parts(copied: list[Citation], decided: list[Citation]) -> list[Citation]:
    """Returns the citations of parts that were copied from passages, and of those that the token memory decided.

    Where they overlap, the passage is named, and what the token memory names besides it comes after it.
    """
    found = []
    for citation in copied:
        sources = {(source.memory, source.document): source for source in citation.sources}
        for other in decided:
            if other.start < citation.end and citation.start < other.end:
                for source in other.sources:
                    sources.setdefault((source.memory, source.document), source)
        found.append(Citation(citation.start, citation.end, list(sources.values())[:_SOURCES]))
    apart = [
        other
        for other in decided
        if not any(other.start < citation.end and citation.start < other.end for citation in copied)
    ]
    return sorted([*found, *apart], key=lambda citation: citation.span)
