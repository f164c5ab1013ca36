"""The documents that a memory held at one moment, searched for exact matches."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import torch
from jaxtyping import Int, Integer

from spalm.compute import map_in_threads
from spalm.memory.exact.matches import Excluded, Matches, SearchedContexts, SearchedShards
from spalm.memory.exact.trace import LEAST, NO_DOCUMENTS, VerbatimSpan, find_spans

_FEWEST, _MOST = 64, 2048
"""Numbers of queries that a thread searches at a time, at least and at most."""


@dataclass(frozen=True)
class ExactView:
    """Exact matches in the documents of one version of a memory. Later changes do not show."""

    shards: list[SearchedContexts]

    @cached_property
    def _searched(self) -> SearchedShards:
        return SearchedShards(self.shards)

    def without(self, documents: Int[np.ndarray, "documents"]) -> "ExactView":
        """Returns a view that does not find these documents, given by the ids of their first entries."""
        found = []
        for shard in self.shards:
            kept = ~np.isin(shard.contexts.first_ids, documents)
            if kept.any():
                found.append(shard if kept.all() else SearchedContexts(shard.contexts.only(kept)))
        return ExactView(found)

    def below(self, id: int) -> "ExactView":
        """Returns a view that finds only documents whose entries have lower ids than this."""
        later = [shard.contexts.first_ids[shard.contexts.first_ids >= id] for shard in self.shards]
        return self.without(np.concatenate(later)) if any(map(len, later)) else self

    def find(self, queries: Int[np.ndarray, "n length"], excluded: Excluded | None = None) -> Matches:
        """Returns the matches of some queries (see `reversed_contexts`)."""
        if len(queries) <= _FEWEST:
            return self._searched.find(queries, excluded)
        threads = torch.get_num_threads()
        size = min(_MOST, max(_FEWEST, ceil(len(queries) / threads)))
        rows = [slice(begin, begin + size) for begin in range(0, len(queries), size)]

        def find(which: slice) -> Matches:
            own = None if excluded is None else Excluded(excluded.first[which], excluded.last[which])
            return self._searched.find(queries[which], own)

        return Matches.concatenate(map_in_threads(find, rows, count=threads))

    def trace(
        self,
        tokens: Integer[np.ndarray, "tokens"],
        least: int = LEAST,
        left_out: Int[np.ndarray, "documents"] = NO_DOCUMENTS,
    ) -> list[VerbatimSpan]:
        """Returns the spans of a text that stand word for word in one document (see `find_spans`)."""
        return find_spans(self.shards, tokens, least, left_out=left_out)
