"""The membership test: whether forgotten documents can be told from others by the rank of their true next token.

The area under the curve is the share of pairs of a token of a member and one of another document in which the member's
ranks better; 0.5 where they cannot be told apart. Its interval is over documents of both kinds.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from proof.intervals import Interval, draw

Ranks = Sequence[np.ndarray]
"""The rank of the true token at every position, a row for each document; 1 is the likeliest."""


def wins(members: Ranks, others: Ranks) -> np.ndarray:
    """Returns for every pair of documents how many pairs of tokens the member wins; a tie is half."""
    found = np.zeros((len(members), len(others)))
    for column, other in enumerate(others):
        ordered = np.sort(other)
        for row, member in enumerate(members):
            before, upto = (np.searchsorted(ordered, member, side=side) for side in ("left", "right"))
            found[row, column] = (len(ordered) - (before + upto) / 2).sum()
    return found


class MembershipTest:
    """Compares states of the same documents with others that were never held, all states on the same draws."""

    def __init__(self, states: Mapping[str, Ranks], others: Ranks, seed: int):
        members = next(iter(states.values()))
        self._wins = {state: wins(ranks, others) for state, ranks in states.items()}
        self._sizes = np.array([len(each) for each in members]), np.array([len(each) for each in others])
        self._times = draw(len(members), seed), draw(len(others), seed + 1)

    def _areas(self, state: str) -> tuple[float, np.ndarray]:
        """Returns the area under the curve, and that of every draw."""
        found, (rows, columns), (members, others) = self._wins[state], self._sizes, self._times
        drawn = ((members @ found) * others).sum(1) / ((members @ rows) * (others @ columns))
        return found.sum() / (rows.sum() * columns.sum()), drawn

    def area(self, state: str) -> Interval:
        """Returns the area under the curve of a state of the documents."""
        return Interval.of(*self._areas(state))

    def difference(self, state: str, other: str) -> Interval:
        """Returns how much larger the area of a state is than that of another."""
        one, two = self._areas(state), self._areas(other)
        return Interval.of(one[0] - two[0], one[1] - two[1])
