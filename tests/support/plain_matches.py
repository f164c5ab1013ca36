"""Exact matches found by comparing a context with every place of every document: slow, and plainly right."""

from dataclasses import dataclass

import numpy as np

from spalm.memory.entries import MISSING
from spalm.memory.exact import LONGEST, Matches
from spalm.memory.exact.matches import LEAST_COUNTS, OCCURRENCES


@dataclass(frozen=True)
class PlainMatch:
    """The longest match of a context that stands at a given number of places."""

    length: int
    count: int
    followers: dict[int, int]
    """Ids and tokens of all entries that come after the match."""


def plain_matches(documents: dict[int, list[int]], context: list[int], excluded: range = range(0)) -> list[PlainMatch]:
    """Returns the matches of a context in documents, which are given by the ids of their first entries.

    A place is left out if the entry after it is excluded. The end of a document is left out with its last entry.
    """
    places = []  # (id of the entry after the place, that entry's token or None, how many tokens before it match)
    for first_id, document in documents.items():
        for end in range(1, len(document) + 1):
            follower = document[end] if end < len(document) else None
            id = first_id + end
            if (id if follower is not None else id - 1) not in excluded:
                places.append((id, follower, _common_end(document[:end], context[-LONGEST:])))
    return [_longest(places, least) for least in LEAST_COUNTS]


def _common_end(one: list[int], other: list[int]) -> int:
    """Returns the number of last tokens that two texts have in common."""
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def _longest(places: list[tuple[int, int | None, int]], least: int) -> PlainMatch:
    """Returns the longest match at `least` places or more; a shorter one if nothing follows it at any of them."""
    enough = False
    for length in range(LONGEST, 0, -1):
        found = [place for place in places if place[2] >= length]
        followers = {id: token for id, token, _ in found if token is not None}
        enough = enough or len(found) >= least
        if enough and followers:
            return PlainMatch(length, len(found), followers)
    return PlainMatch(0, 0, {})


def assert_same_matches(found: Matches, row: int, expected: list[PlainMatch]) -> None:
    """Compares the matches of one query: lengths, counts, and the occurrences, or a sample of them if they are many."""
    for level, match in enumerate(expected):
        assert (found.lengths[row, level], found.counts[row, level]) == (match.length, match.count)
        ids, tokens = found.ids[row, level], found.tokens[row, level]
        taken = dict(zip(ids[ids != MISSING].tolist(), tokens[ids != MISSING].tolist()))
        assert len(taken) == (ids != MISSING).sum(), "an occurrence was taken twice"
        np.testing.assert_array_equal(tokens == MISSING, ids == MISSING)
        assert taken.items() <= match.followers.items()
        if match.count <= OCCURRENCES:
            assert taken == match.followers
        assert bool(taken) == bool(match.followers)
