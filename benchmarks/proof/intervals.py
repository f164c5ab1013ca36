"""Intervals by the bootstrap: documents, questions or problems are drawn again with replacement, all rows together.

Rows are compared on the same draws, so the interval of a change is that of the paired difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 2000
"""Number of times that a sample is drawn again."""
_OUTSIDE = 2.5
"""Percentage of draws below and above an interval."""


@dataclass(frozen=True)
class Interval:
    """A figure and where 95 of 100 draws of it lie."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: np.ndarray) -> "Interval":
        """Returns the interval that these draws give."""
        low, high = np.percentile(draws, [_OUTSIDE, 100 - _OUTSIDE])
        return cls(float(value), float(low), float(high))


def draw(count: int, seed: int) -> np.ndarray:
    """Returns how often each of `count` documents is in each draw, a row for each draw."""
    random = np.random.default_rng(seed)
    return random.multinomial(count, np.full(count, 1 / count), size=_DRAWS).astype(float)


def of_means(values: Sequence[float], seed: int) -> Interval:
    """Returns the mean of some values, each of one question or problem, and its interval."""
    found = np.asarray(values, float)
    times = draw(len(found), seed)
    return Interval.of(found.mean(), times @ found / len(found))


def of_ratio(parts: Sequence[float], wholes: Sequence[float], seed: int) -> Interval:
    """Returns the sum of some parts divided by that of the wholes they belong to, and its interval.

    Draws in which the wholes are 0 are left out.
    """
    top, bottom = np.asarray(parts, float), np.asarray(wholes, float)
    if not bottom.sum():
        return Interval(float("nan"), float("nan"), float("nan"))
    times = draw(len(top), seed)
    drawn = times @ bottom
    return Interval.of(top.sum() / bottom.sum(), (times @ top)[drawn > 0] / drawn[drawn > 0])


def of_perplexities(documents: Mapping[str, Sequence[float]], seed: int) -> dict[str, dict[str, Interval]]:
    """Returns the perplexity of every row, and its change against `plain`, each with its interval.

    `documents` holds the number of `tokens` of every document and, by row, the sum of log p over them.
    """
    tokens = np.asarray(documents["tokens"], float)
    times = draw(len(tokens), seed)
    drawn = times @ tokens
    kept = drawn > 0
    values, draws = {}, {}
    for name, sums in documents.items():
        if name != "tokens":
            own = np.asarray(sums, float)
            values[name] = np.exp(-own.sum() / tokens.sum())
            draws[name] = np.exp(-(times @ own)[kept] / drawn[kept])
    return {
        name: {
            "perplexity": Interval.of(values[name], draws[name]),
            "change": Interval.of(values[name] / values["plain"] - 1, draws[name] / draws["plain"] - 1),
        }
        for name in values
    }
