"""Scores of answers to questions, as SQuAD's official script computes them, and of the citations beside them."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SIGNS = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Returns a text in lower case without punctuation, articles and white space that is not needed."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_SIGNS)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if an answer is one of the references, apart from what is normalised, else 0."""
    return float(normalised(answer) in {normalised(each) for each in references})


def f1(answer: str, references: Sequence[str]) -> float:
    """Returns the highest F1 of the words that an answer shares with a reference."""
    return max(_f1(normalised(answer).split(), normalised(each).split()) for each in references)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * shared / (len(answer) + len(reference))


def holds_reference(answer: str, references: Sequence[str]) -> bool:
    """Returns whether the words of a reference stand in a row in an answer."""
    words = f" {normalised(answer)} "
    return any(f" {normalised(each)} " in words for each in references if normalised(each))


@dataclass(frozen=True)
class CitationCounts:
    """Citations of one answer: how many there are, how many of them name the right paragraph, and whether one does."""

    given: int
    right: int

    @property
    def found(self) -> bool:
        """Whether one of them names the right paragraph."""
        return self.right > 0

    @classmethod
    def of(cls, named: Sequence[str], paragraph: str) -> "CitationCounts":
        """Counts citations, given by the paragraph that each of them names first."""
        return cls(len(named), sum(name == paragraph for name in named))
