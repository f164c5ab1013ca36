"""The memories that are chosen for an answer, searched as if they were one.

Neighbours of all of them are ordered by their distance. Exact matches are looked for in the documents of all together:
a match is as long, and stands at as many places, as it would in one memory that held everything. Paragraphs are ranked
together too. So it makes no difference to an answer how its documents are divided among memories, but for what the
index of each memory does not find.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from spalm.generation.memories.joined import JoinedEntries, joined_matches
from spalm.generation.memories.usable import UsableMemory
from spalm.generation.passages.ranking import RankedPassage, rank_together, tell_something
from spalm.memory import Entries, EntrySource, divided_id, joined_ids
from spalm.memory.exact import ExactView
from spalm.semiparametric import Matched, Retrieved

NumberedMemory = tuple[int, str, UsableMemory]
"""A memory with its number among the open ones and its name."""


class MemorySelection:
    """Some of the memories that are open beside a model."""

    def __init__(self, memories: Sequence[NumberedMemory]):
        self._memories = memories
        self.names = tuple(name for _, name, _ in memories)
        """Names of the memories, in the order in which they were opened."""
        self._joined: tuple[list[Entries], JoinedEntries] | None = None
        self._view: tuple[list[ExactView], ExactView] | None = None

    @property
    def has_keys(self) -> bool:
        """Whether any of the memories has keys."""
        return any(memory.has_keys for _, _, memory in self._memories)

    @property
    def _only_first(self) -> UsableMemory | None:
        """The memory with number 0 if it alone is chosen: its own ids are those of the selection."""
        return self._memories[0][2] if len(self._memories) == 1 and not self._memories[0][0] else None

    def entries(self) -> Entries | JoinedEntries:
        """Returns the live entries as of now. Cheap while nothing has changed."""
        if (only := self._only_first) is not None:
            return only.memory.entries()
        parts = [memory.memory.entries() for _, _, memory in self._memories]
        joined = self._joined  # read once: other threads may replace it
        if joined is None or not _are_same(joined[0], parts):
            numbers = [number for number, _, _ in self._memories]
            joined = self._joined = parts, JoinedEntries([*zip(numbers, parts)])
        return joined[1]

    def nearest(self, keys: Float[np.ndarray, "n width"]) -> Retrieved:
        """Returns the nearest neighbours of some keys in all memories that have keys."""
        if (only := self._only_first) is not None:
            return only.search(keys)
        found = [self._nearest_in(number, memory, keys) for number, _, memory in self._memories if memory.has_keys]
        if not found:
            return Retrieved.empty(len(keys))
        count = max(distances.shape[1] for _, distances, _ in found)
        ids, distances, tokens = (np.concatenate(columns, axis=1) for columns in zip(*found))
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :count]
        taken = [np.take_along_axis(columns, nearest, axis=1) for columns in (tokens, distances, ids)]
        tokens, distances, ids = map(torch.from_numpy, taken)
        return Retrieved(tokens, distances, ids)

    @staticmethod
    def _nearest_in(
        number: int, memory: UsableMemory, keys: Float[np.ndarray, "n width"]
    ) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """Returns ids, distances and tokens of the nearest neighbours in one memory."""
        entries = memory.memory.entries()
        ids, distances = memory.search.find(keys, entries=entries)
        return joined_ids(number, ids), distances.astype(np.float32), entries.tokens_of(ids, missing=0)

    def add_matches(self, retrieved: Retrieved, contexts: Int[np.ndarray, "n length"]) -> Retrieved:
        """Returns what was retrieved for some positions with the exact matches of their contexts."""
        return replace(retrieved, matched=Matched.of(self._exact().find(contexts)))

    def _exact(self) -> ExactView:
        """Returns the documents of all memories as of now, to be searched for exact matches."""
        if (only := self._only_first) is not None:
            return only.memory.exact.current()
        views = [memory.memory.exact.current() for _, _, memory in self._memories]
        joined = self._view
        if joined is None or not _are_same(joined[0], views):
            numbers = [number for number, _, _ in self._memories]
            joined = self._view = views, joined_matches([*zip(numbers, views)])
        return joined[1]

    def source(self, id: int) -> tuple[str, EntrySource] | None:
        """Returns the name of an entry's memory, and the place there that it comes from; None if it is not alive."""
        number, own = divided_id(id)
        for each, name, memory in self._memories:
            if each == number:
                source = memory.memory.entries().source(own)
                return None if source is None else (name, source)
        return None

    def passages(self, text: str, count: int) -> list[RankedPassage]:
        """Returns the paragraphs of the memories that fit a text best, the best first."""
        if len(self._memories) == 1:
            ((_, name, memory),) = self._memories
            return [replace(passage, memory=name) for passage in memory.passages.best(text, count)]
        return rank_together([(name, memory.passages) for _, name, memory in self._memories], text, count)

    def tell_something(self, words: Sequence[str]) -> list[bool]:
        """Returns for every word, in lower case, whether it stands in few of the memories' paragraphs."""
        return tell_something([memory.passages for _, _, memory in self._memories], words)


def _are_same(known: Sequence[object], current: Sequence[object]) -> bool:
    """Returns whether two lists hold the same objects."""
    return all(one is other for one, other in zip(known, current, strict=True))
