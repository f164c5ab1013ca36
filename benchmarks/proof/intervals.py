"""Intervals by the bootstrap: documents, paragraphs or problems are drawn again with replacement, all rows together.

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
    return of_ratio(values, np.ones(len(values)).tolist(), seed)


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


def sums_by_group(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """Returns the sum of the values of each group, in the order in which groups first occur."""
    sums = dict.fromkeys(groups, 0.0)
    for value, group in zip(values, groups, strict=True):
        sums[group] += value
    return list(sums.values())


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


def of_median_change(domains: Sequence[Mapping[str, Sequence[float]]], row: str, seed: int) -> Interval:
    """Returns the median of the changes that a row brings to the perplexity of several domains, and its interval.

    In each draw domains are drawn again, and the documents of every domain.
    """
    values, draws = [], []
    for number, documents in enumerate(domains):
        tokens = np.asarray(documents["tokens"], float)
        gains = np.asarray(documents[row], float) - np.asarray(documents["plain"], float)
        times = draw(len(tokens), seed + number)
        values.append(np.exp(-gains.sum() / tokens.sum()) - 1)
        draws.append(np.exp(-(times @ gains) / np.maximum(times @ tokens, 1)) - 1)
    chosen = np.random.default_rng(seed).integers(len(domains), size=(_DRAWS, len(domains)))
    drawn = np.take_along_axis(np.stack(draws, 1), chosen, axis=1)
    return Interval.of(float(np.median(values)), np.median(drawn, axis=1))
