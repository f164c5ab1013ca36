"""The interface that a search library, or a vector database, must implement to serve live queries.

An index only proposes candidates. It may propose too few, some twice, forgotten ones, and in any order: the `Searcher`
checks in the memory which of them are alive, and compares whole keys.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int


class Index(Protocol):
    """An approximate index of entries by their keys."""

    effort: int
    """Number of partitions or leaves that a query searches: more effort finds more."""
    most_effort: int
    """Effort at which a query searches everything."""
    on_disk: bool
    """Whether the index is for memories larger than RAM: then the keys of candidates are fetched all at once."""

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:
        """Adds entries; returns False if this kind of index cannot, so that they must be searched exactly."""
        ...

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        """Removes entries, if this kind of index can: the searcher leaves them out in any case."""

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        """Returns the ids of about `count` near entries for each query, MISSING where it has fewer."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the index to a folder."""
