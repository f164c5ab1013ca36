"""Several memories as one: their entries and exact matches, by ids that name the memory too (see `joined_ids`)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from spalm.memory import MISSING, Entries, LiveDocuments, divided_ids, joined_ids
from spalm.memory.exact import ExactView
from spalm.memory.exact.matches import SearchedContexts


def joined_matches(views: Sequence[tuple[int, ExactView]]) -> ExactView:
    """Returns one view of the exact matches in several memories, given with their numbers."""
    shards = []
    for number, view in views:
        for shard in view.shards:
            first_ids = joined_ids(number, shard.contexts.first_ids)
            shards.append(SearchedContexts(replace(shard.contexts, first_ids=first_ids)) if number else shard)
    return ExactView(shards)


class JoinedEntries:
    """The live entries of several memories, at one version of each."""

    def __init__(self, parts: Sequence[tuple[int, Entries]]):
        """`parts`: the entries of each memory and its number, by rising number."""
        self._parts = parts
        held = [(number, entries.live_documents) for number, entries in parts]
        first_ids = np.concatenate([joined_ids(number, each.first_ids) for number, each in held])
        counts = np.concatenate([each.entries for _, each in held])
        names = [name for _, each in held for name in each.names]
        self.live_documents = LiveDocuments(np.arange(len(names)), first_ids, counts, names)
        """The documents of all memories. Their numbers in the catalogues are left out: several have the same."""

    def rows(self, ids: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the rows of entries in their own memories, MISSING for ids that are not alive."""
        found, (numbers, own) = np.full(np.shape(ids), MISSING), divided_ids(ids)
        for number, entries in self._parts:
            here = numbers == number
            if here.any():
                found[here] = entries.rows(own[here])
        return found

    def tokens_of(self, ids: Int[np.ndarray, "*n"], *, missing: int = MISSING) -> Int[np.ndarray, "*n"]:
        """Returns the values of entries by their ids, `missing` for those that are not alive."""
        found, (numbers, own) = np.full(np.shape(ids), missing), divided_ids(ids)
        for number, entries in self._parts:
            here = numbers == number
            if here.any():
                found[here] = entries.tokens_of(own[here], missing=missing)
        return found
