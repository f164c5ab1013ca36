"""Vectors of which there are many copies: each is searched once, and its copies are put into the lists afterwards.

A partition cannot be smaller than the copies of one vector, and comparing them all with each other costs their number
squared: a file of a million embeddings in which every fifth is that of an empty text would take hours.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from spalm.memory import MISSING
from spalm.neighbours.graph.given_vectors import GivenVectors
from spalm.neighbours.graph.survey import rows_at_once
from spalm.neighbours.kernels import spread_to_copies
from spalm.neighbours.parallel import chunks

MOST_COPIES = 64
"""Number of copies up to which a vector is searched like any other."""


@dataclass(frozen=True)
class Copies:
    """Which vectors are equal."""

    distinct: Int[np.ndarray, "distinct"]
    """First row of each distinct vector, rising."""
    number_of: Int[np.ndarray, "n"]
    """Number of the distinct vector that each row is."""
    starts: Int[np.ndarray, "distinct+1"]
    """Distinct vector v is in the rows members[starts[v] : starts[v + 1]]."""
    members: Int[np.ndarray, "n"]
    """All rows, by distinct vectors."""

    def spread(
        self, found: Int[np.ndarray, "n some"], squared: Float[np.ndarray, "n some"], k: int, *, nearest: np.ndarray
    ) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
        """Returns the k nearest rows and their squared distances, by the distinct vectors that were found.

        `nearest` are distinct vectors that come before those found, at a distance of 0; MISSING where there is none.
        """
        ids, gaps = np.full((len(found), k), MISSING, np.int64), np.full((len(found), k), np.inf, np.float32)
        spread_to_copies(found, squared, nearest, self.starts, self.members, ids, gaps)
        return ids, gaps


def find_copies(given: GivenVectors, hashes: np.ndarray) -> Copies | None:
    """Returns which vectors are equal, by hashes that are equal for equal ones; None if none has many copies."""
    numbers = np.arange(len(given))
    order = np.argsort(hashes, kind="stable")
    begins = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]))
    sizes = np.diff(begins, append=len(order))
    if sizes.max() <= MOST_COPIES:
        return None
    representative = np.empty(len(order), np.int64)
    representative[order] = np.repeat(order[begins], sizes)
    same = np.flatnonzero(representative != numbers)
    for first, last in chunks(0, len(same), rows_at_once(given.width)):
        rows = same[first:last]
        differ = (given.take(rows) != given.take(representative[rows])).any(1)
        representative[rows[differ]] = rows[differ]  # only the hashes are equal
    distinct = np.flatnonzero(representative == numbers)
    number_of = np.searchsorted(distinct, representative)
    counts = np.bincount(number_of)
    if counts.max() <= MOST_COPIES:
        return None
    starts = np.concatenate([[0], np.cumsum(counts)])
    return Copies(distinct, number_of, starts, np.argsort(number_of, kind="stable"))
