"""One pass over vectors before they are searched: refuses what has no distance, measures lengths, takes a digest."""

import hashlib
from dataclasses import dataclass

import numpy as np

from spalm.choices import MetricName
from spalm.console import bar
from spalm.errors import InputError
from spalm.neighbours.graph.given_vectors import GivenVectors
from spalm.neighbours.kernels import hash_rows
from spalm.neighbours.parallel import chunks

_BYTES = 8 << 20
"""Bytes of double precision that are looked at together."""
_EXPONENTS = 1 << 12
"""Number of binary exponents of lengths that are counted apart."""


@dataclass(frozen=True)
class Survey:
    """What is known about vectors after reading them once."""

    longest: float
    """Length of the longest vector."""
    median_exponent: int
    """Binary exponent of the median length, vectors of length 0 left out: it is below 2 to this power."""
    longest_exponent: int
    """The same of the longest vector."""
    digest: str
    """SHA-256 of their type, their shape and their numbers."""
    hashes: np.ndarray | None
    """A hash of each vector, which is the same for equal ones; None if it was not asked for."""


def survey_vectors(given: GivenVectors, metric: MetricName, *, hashed: bool = False) -> Survey:
    """Reads all vectors; refuses such as have no neighbours by this metric."""
    hashes = np.empty(len(given), np.uint64) if hashed else None
    factors = np.random.default_rng(0).integers(0, 1 << 64, given.width, np.uint64) | np.uint64(1)
    digest = hashlib.sha256(f"{given.kind} {len(given)} {given.width}".encode())
    counts, longest = np.zeros(_EXPONENTS, np.int64), 0.0
    with bar(f"read {given.name}", len(given)) as shown:
        for first, last in chunks(0, len(given), rows_at_once(given.width)):
            numbers = np.ascontiguousarray(given.read(first, last))
            digest.update(numbers.data)
            if hashes is not None:
                hash_rows(numbers.view(np.uint16 if given.is_half else np.uint32), factors, hashes[first:last])
            lengths = lengths_of(numbers)
            _check(given, metric, lengths, first=first)
            longest = max(longest, float(lengths.max()))
            counts += np.bincount(_exponents(lengths[lengths > 0]) + _EXPONENTS // 2, minlength=_EXPONENTS)
            shown.advance(last - first)
    middle = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2)) - _EXPONENTS // 2 if counts.any() else 0
    return Survey(longest, middle, int(_exponents(np.float64(longest))), digest.hexdigest(), hashes)


def rows_at_once(width: int) -> int:
    """Returns the number of rows that are converted together: few enough to take little RAM in double precision."""
    return max(1, _BYTES // (8 * width))


def lengths_of(numbers: np.ndarray) -> np.ndarray:
    """Returns the lengths of vectors, in double precision, in which no square of a single one overflows."""
    double = numbers.astype(np.float64)
    return np.sqrt(np.einsum("ij,ij->i", double, double))


def _exponents(lengths: np.ndarray | np.float64) -> np.ndarray:
    """Returns the binary exponents of lengths."""
    return np.frexp(lengths)[1]


def _check(given: GivenVectors, metric: MetricName, lengths: np.ndarray, *, first: int) -> None:
    """Raises an error if a vector has no distance to others."""
    wrong = np.flatnonzero(~np.isfinite(lengths))
    if len(wrong):
        raise InputError(
            f"{given.name}: row {first + int(wrong[0]):,} holds a number that is not finite in single precision; "
            "leave such rows out"
        )
    if metric == "cosine" and not lengths.all():
        row = first + int(np.flatnonzero(lengths == 0)[0])
        raise InputError(
            f"{given.name}: row {row:,} is zero and has no direction; leave it out, or take another metric"
        )
