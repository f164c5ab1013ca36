"""Retrieved neighbours: from the ids of entries to the tokens that followed them.

For positions of the corpus this is a look-up in the neighbour table.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.corpus import Split
from spalm.errors import InputError
from spalm.memory import EntryLookup
from spalm.neighbours import MISSING, NeighbourTable, drop_forgotten
from spalm.semiparametric.matched import Matched, Matcher


@dataclass(frozen=True)
class Retrieved:
    """The neighbours of some positions, nearest first: the tokens y_k that followed them, and their distances."""

    tokens: Int[Tensor, "*batch count"]
    """Tokens that followed the neighbours; arbitrary where there is no neighbour."""
    distances: Float[Tensor, "*batch count"]
    """Squared distances; infinite where there is no neighbour."""
    ids: Int[Tensor, "*batch count"]
    """Ids of the entries; MISSING where there is no neighbour."""
    matched: Matched | None = None
    """Exact matches of the same positions, where the memory was asked for them."""

    @classmethod
    def empty(cls, rows: int) -> "Retrieved":
        """Returns no neighbours at all for each of `rows` positions."""
        ids = torch.zeros(rows, 0, dtype=torch.long)
        return cls(ids, ids.float(), ids)

    @classmethod
    def from_ids(
        cls, ids: Int[np.ndarray, "*batch count"], distances: Float[np.ndarray, "*batch count"], entries: EntryLookup
    ) -> "Retrieved":
        """Returns neighbours with the tokens that followed them; forgotten entries must be MISSING already."""
        tokens = torch.from_numpy(entries.tokens_of(ids, missing=0))
        distances, ids = np.require(distances, np.float32, "W"), np.require(ids, np.int64, "W")
        return cls(tokens, torch.from_numpy(distances), torch.from_numpy(ids))

    @property
    def present(self) -> Bool[Tensor, "*batch count"]:
        """Mask of the neighbours that exist."""
        return self.distances < torch.inf

    def nearest(self, count: int) -> "Retrieved":
        """Returns the `count` nearest neighbours of each position."""
        if self.tokens.shape[-1] <= count:
            return self
        near = self.tokens[..., :count], self.distances[..., :count], self.ids[..., :count]
        return Retrieved(*near, matched=self.matched)

    def without_neighbours(self) -> "Retrieved":
        """Returns the same columns with no neighbour in them; exact matches stay."""
        nothing = torch.full_like(self.distances, torch.inf), torch.full_like(self.ids, MISSING)
        return Retrieved(self.tokens, *nothing, matched=self.matched)

    def padded(self, count: int) -> "Retrieved":
        """Returns at least `count` columns; the added ones hold no neighbour."""
        if self.tokens.shape[-1] >= count:
            return self
        missing = (0, count - self.tokens.shape[-1])
        pad = torch.nn.functional.pad
        return Retrieved(
            pad(self.tokens, missing),
            pad(self.distances, missing, value=torch.inf),
            pad(self.ids, missing, value=MISSING),
            self.matched,
        )

    def __getitem__(self, rows) -> "Retrieved":
        matched = None if self.matched is None else self.matched[rows]
        return Retrieved(self.tokens[rows], self.distances[rows], self.ids[rows], matched)

    def to(self, device: torch.device) -> "Retrieved":
        """Returns the same neighbours on a device."""
        if self.ids.device == device:
            return self
        matched = None if self.matched is None else self.matched.to(device)
        return Retrieved(self.tokens.to(device), self.distances.to(device), self.ids.to(device), matched)


def advance_neighbours(previous: Retrieved, observed: Int[Tensor, "n"], entries: EntryLookup) -> Retrieved:
    """Returns neighbours for the next position without a search.

    They are the entries that follow those neighbours of the previous position whose token was the observed one, with
    the distances that these had.
    """
    ids = previous.ids.cpu().numpy()
    held = entries.live_documents
    right = (previous.present & (previous.tokens == observed[:, None])).cpu().numpy()
    follows = right & (held.index_of(ids) == held.index_of(ids + 1)) & (entries.rows(ids + 1) >= 0)
    distances = np.where(follows, previous.distances.cpu().numpy(), np.inf).astype(np.float32)
    order = np.argsort(distances, axis=-1, kind="stable")
    advanced = np.take_along_axis(np.where(follows, ids + 1, MISSING), order, -1)
    distances = np.take_along_axis(distances, order, -1)
    return Retrieved.from_ids(advanced, distances, entries).to(previous.tokens.device)


class Retriever:
    """Neighbours of the positions of one split, from the table and the memory's version at the time it was opened.

    With a matcher, the exact matches of the positions too.
    """

    def __init__(self, table: NeighbourTable, split: Split, count: int, *, matcher: Matcher | None = None):
        ids, distances = table.array(f"{split}.ids"), table.array(f"{split}.distances")
        if count > ids.shape[1]:
            raise InputError(
                f"{table.directory} holds {ids.shape[1]} neighbours of each {split} position, {count} are asked for; "
                f"raise neighbours.{'count' if split == 'train' else 'held_out'} or ask for fewer"
            )
        self._ids, self._distances, self._matcher = ids[:, :count], distances[:, :count], matcher
        self._entries = table.memory.entries()

    def __call__(self, positions: Int[np.ndarray, "*batch"]) -> Retrieved:
        """Returns what the memory has for some positions, without documents that were forgotten."""
        flat = positions.reshape(-1)
        ids, distances = self._ids[flat].astype(np.int64), self._distances[flat]
        ids, distances = drop_forgotten(ids, distances, self._entries)
        shape = (*positions.shape, ids.shape[1])
        found = Retrieved.from_ids(ids.reshape(shape), distances.reshape(shape), self._entries)
        return found if self._matcher is None else replace(found, matched=self._matcher(positions))
