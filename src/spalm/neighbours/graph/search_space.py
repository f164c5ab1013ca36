"""The space of a search: every metric as the Euclidean distance of other vectors.

    l2        the vectors themselves, multiplied by a power of two, which changes no digit
    cosine    the vectors, all of one length R: 1 - cos = d^2 / (2 R^2)
    ip        keys get one more dimension that brings them to one length R, queries get a zero there, and the length R:
              q.k = |q| max|k| (1 - d^2 / (2 R^2))

The greatest inner product is thus the smallest distance, and so for the cosine.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Float, Int

from spalm.choices import MetricName
from spalm.compute import SentByFields
from spalm.memory import MISSING
from spalm.neighbours.graph.given_vectors import GivenVectors
from spalm.neighbours.graph.survey import Survey, lengths_of, rows_at_once
from spalm.neighbours.parallel import chunks
from spalm.neighbours.recall import Tolerance

_LENGTH, _EXPONENT = 64.0, 6
"""Length R, and its binary logarithm: a partition's scan in half precision has its best range around it."""
_LONGEST_EXPONENT, _SHORTEST_EXPONENT = 13, -3
"""Exponents of lengths between which vectors are scanned in half precision as they are."""
TOLERANCE = Tolerance(relative=1e-6, absolute=0.0)
"""Differences of squared distances that do not count: those of rounding in single precision."""


@dataclass(frozen=True)
class SearchSpace(SentByFields):
    """The conversion of given vectors into the vectors that are searched, and of distances back."""

    metric: MetricName
    """Metric that was asked for."""
    dtype: str
    """Type of the vectors that are searched: float16 where it holds them exactly, else float32."""
    scale: int = 0
    """With l2: exponent of the power of two by which vectors are multiplied."""
    longest: float = 1.0
    """With ip: length of the longest key."""

    @classmethod
    def of(cls, metric: MetricName, given: list[GivenVectors], surveys: list[Survey]) -> Self:
        """Returns the space in which vectors are searched: the keys, which come first, and perhaps queries."""
        keys, longest = surveys[0], max(survey.longest_exponent for survey in surveys)
        if metric == "ip":
            return cls(metric, "<f4", longest=keys.longest or 1.0)
        if metric == "cosine":
            return cls(metric, "<f4")
        fits = longest <= _LONGEST_EXPONENT and keys.median_exponent >= _SHORTEST_EXPONENT
        if fits and all(each.is_half for each in given):
            return cls(metric, "<f2")
        return cls(metric, "<f4", scale=min(_EXPONENT - keys.median_exponent, _LONGEST_EXPONENT - longest))

    def width(self, given: int) -> int:
        """Returns the dimensions of what is searched, by those that are given."""
        return given + (self.metric == "ip")

    def convert(self, numbers: np.ndarray, *, as_queries: bool) -> np.ndarray:
        """Returns the vectors that are searched, or with which others are searched."""
        if self.metric == "l2":
            return np.ldexp(numbers.astype(np.float32), self.scale) if self.scale else numbers.astype(self.dtype)
        double = numbers.astype(np.float64)
        if self.metric == "ip" and not as_queries:
            double *= _LENGTH / self.longest
            more = np.sqrt(np.maximum(_LENGTH**2 - np.einsum("ij,ij->i", double, double), 0))
            return np.column_stack([double, more]).astype(self.dtype)
        lengths = lengths_of(double)[:, None]
        double *= _LENGTH / np.where(lengths > 0, lengths, 1.0)
        if self.metric == "ip":
            double = np.column_stack([double, np.zeros(len(double))])
        return double.astype(self.dtype)

    def distances(
        self, squared: Float[np.ndarray, "n k"], query_lengths: Float[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n k"]:
        """Returns the distances of the metric, by squared distances in this space; infinite ones stay."""
        double = squared.astype(np.float64)
        found = np.ldexp(np.sqrt(double), -self.scale) if self.metric == "l2" else double / (2 * _LENGTH**2)
        if self.metric == "ip":
            products = (1 - np.where(np.isinf(double), 0, found)) * query_lengths[:, None] * self.longest
            found = np.where(np.isinf(double), np.inf, -products)
        with np.errstate(over="ignore"):
            return found.astype(np.float32)


@dataclass(frozen=True)
class SearchVectors(SentByFields):
    """Given vectors in the space of a search, with the interface `Vectors`; converted whenever they are read."""

    given: GivenVectors
    """The vectors."""
    space: SearchSpace
    """The space."""
    as_queries: bool = False
    """Whether they are the queries of the search and not the keys."""
    rows: Int[np.ndarray, "n"] | None = None
    """Rows of the vectors that are searched; None: all."""

    def __len__(self) -> int:
        return len(self.given) if self.rows is None else len(self.rows)

    @property
    def width(self) -> int:
        """Dimensions of the space."""
        return self.space.width(self.given.width)

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        """Returns consecutive vectors."""
        found = np.empty((stop - start, self.width), self.space.dtype)
        for first, last in chunks(start, stop, rows_at_once(self.given.width)):
            found[first - start : last - start] = self._converted(self._read(first, last))
        return found

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        """Returns vectors in any rows."""
        flat = rows.ravel()
        found = np.empty((len(flat), self.width), self.space.dtype)
        for first, last in chunks(0, len(flat), rows_at_once(self.given.width)):
            found[first:last] = self._converted(self._take(flat[first:last]))
        return found.reshape(*rows.shape, self.width)

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the numbers of the rows."""
        return np.arange(start, stop)

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns MISSING: vectors are in no documents."""
        return np.full(stop - start, MISSING)

    def _read(self, first: int, last: int) -> np.ndarray:
        return self.given.read(first, last) if self.rows is None else self.given.take(self.rows[first:last])

    def _take(self, rows: np.ndarray) -> np.ndarray:
        return self.given.take(rows if self.rows is None else self.rows[rows])

    def _converted(self, numbers: np.ndarray) -> np.ndarray:
        return self.space.convert(numbers, as_queries=self.as_queries)
