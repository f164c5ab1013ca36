"""Self-exclusion: a query must not find itself and, if so set, what is near it or in its document."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from pydantic import Field

from spalm.settings import Settings

NOT_AN_ENTRY = np.iinfo(np.int64).min // 2
"""Number that stands for the id, and the document, of a query that is not in the memory: far from every real number."""


class Exclusion(Settings):
    """Rule by which the neighbours of a training position leave out its own surroundings."""

    window: int = Field(default=0, ge=0)
    """Distance in entries within which a training position finds no neighbours, before and after it; 0: only itself."""
    document: bool = False
    """Whether a training position's neighbours come from other documents only."""

    def forbids(
        self,
        own_ids: Int[np.ndarray, "*#n"],
        own_documents: Int[np.ndarray, "*#n"],
        ids: Int[np.ndarray, "*#n"],
        *,
        documents: Int[np.ndarray, "*#n"],
    ) -> Bool[np.ndarray, "*#n"]:
        """Returns whether queries with these own ids must not find the entries `ids`; shapes broadcast."""
        forbidden = np.abs(ids - own_ids) <= self.window
        return forbidden | (documents == own_documents) if self.document else forbidden


ONLY_ITSELF = Exclusion()
"""The weakest rule: a query does not find itself."""


@dataclass(frozen=True)
class QueryExclusion:
    """The exclusion of a batch of queries: the rule, and which entry and document each query is."""

    own_ids: Int[np.ndarray, "n"]
    """Entry id of each query; NOT_AN_ENTRY where it has none."""
    own_documents: Int[np.ndarray, "n"]
    """Document number of each query; NOT_AN_ENTRY where it has none."""
    rule: Exclusion
    """Rule that all queries follow."""

    @classmethod
    def nothing(cls, count: int) -> "QueryExclusion":
        """Returns the exclusion of `count` queries that may find every entry."""
        return cls(np.full(count, NOT_AN_ENTRY), np.full(count, NOT_AN_ENTRY), ONLY_ITSELF)

    def __len__(self) -> int:
        return len(self.own_ids)

    @property
    def forbids_something(self) -> bool:
        """Whether any query is an entry itself."""
        return bool((self.own_ids != NOT_AN_ENTRY).any())

    def __getitem__(self, which: slice | np.ndarray) -> "QueryExclusion":
        return QueryExclusion(self.own_ids[which], self.own_documents[which], self.rule)

    def forbids(
        self, query: Int[np.ndarray, "*#n"], ids: Int[np.ndarray, "*#n"], documents: Int[np.ndarray, "*#n"]
    ) -> Bool[np.ndarray, "*#n"]:
        """Returns whether the queries with these numbers must not find these entries."""
        return self.rule.forbids(self.own_ids[query], self.own_documents[query], ids, documents=documents)
