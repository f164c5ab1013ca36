"""What a query must not find: itself, and if asked for its surroundings or its document."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from pydantic import Field

from spalm.settings import Settings

STRANGER = np.iinfo(np.int64).min // 2
"""In place of the id of a query that is not in the memory, and of its document: far from every id."""


class Exclusion(Settings):
    window: int = Field(default=0, ge=0)
    """Entries this near a training position, before and after it, are never its neighbours; 0: only itself."""
    document: bool = False
    """A training position's neighbours come from other documents only."""

    def forbids(
        self,
        own: Int[np.ndarray, "*n"],
        own_documents: Int[np.ndarray, "*n"],
        ids: Int[np.ndarray, "*n"],
        documents: Int[np.ndarray, "*n"],
    ) -> Bool[np.ndarray, "*n"]:
        """Elementwise, shapes broadcast: whether the query with the id `own` must not find the entry `ids`."""
        forbidden = np.abs(ids - own) <= self.window
        return forbidden | (documents == own_documents) if self.document else forbidden


ONLY_ITSELF = Exclusion()


@dataclass(frozen=True)
class Askers:
    """Who asks: the ids and documents of queries, STRANGER where they are not entries, and what they must not find."""

    ids: Int[np.ndarray, "n"]
    documents: Int[np.ndarray, "n"]
    exclusion: Exclusion

    @classmethod
    def strangers(cls, count: int) -> "Askers":
        """Queries that may find anything."""
        return cls(np.full(count, STRANGER), np.full(count, STRANGER), ONLY_ITSELF)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: slice | np.ndarray) -> "Askers":
        return Askers(self.ids[which], self.documents[which], self.exclusion)

    def forbid(
        self, query: Int[np.ndarray, "*n"], ids: Int[np.ndarray, "*n"], documents: Int[np.ndarray, "*n"]
    ) -> Bool[np.ndarray, "*n"]:
        """Whether the queries with these numbers must not find these entries."""
        return self.exclusion.forbids(self.ids[query], self.documents[query], ids, documents)
