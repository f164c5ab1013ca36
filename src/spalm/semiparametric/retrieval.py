"""From a position to the tokens that followed its neighbours: a look-up in the table, once that is made."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.corpus import Split
from spalm.errors import InputError
from spalm.memory import Entries
from spalm.neighbours import MISSING, NeighbourTable
from spalm.neighbours.table import without_the_forgotten


@dataclass(frozen=True)
class Retrieved:
    """The neighbours of some positions, nearest first: the tokens y_k that followed them, and how far away they are."""

    tokens: Int[Tensor, "*batch count"]
    distances: Float[Tensor, "*batch count"]
    """Squared; infinite where there is no such neighbour, whatever token stands there."""
    ids: Int[Tensor, "*batch count"]
    """The entries themselves; MISSING where there is none."""

    @classmethod
    def nothing(cls, rows: int) -> "Retrieved":
        """No neighbours at all."""
        nothing = torch.zeros(rows, 0, dtype=torch.long)
        return cls(nothing, nothing.float(), nothing)

    @property
    def there(self) -> Bool[Tensor, "*batch count"]:
        return torch.isfinite(self.distances)

    def first(self, count: int) -> "Retrieved":
        return self[..., :count]

    def padded(self, count: int) -> "Retrieved":
        """With at least so many columns; those that are added hold nothing."""
        missing = (0, max(0, count - self.tokens.shape[-1]))
        pad = torch.nn.functional.pad
        return Retrieved(
            pad(self.tokens, missing),
            pad(self.distances, missing, value=torch.inf),
            pad(self.ids, missing, value=MISSING),
        )

    def __getitem__(self, which) -> "Retrieved":
        return Retrieved(self.tokens[which], self.distances[which], self.ids[which])

    def to(self, device: torch.device) -> "Retrieved":
        return Retrieved(self.tokens.to(device), self.distances.to(device), self.ids.to(device))


def look_up(
    ids: Int[np.ndarray, "*batch count"], distances: Float[np.ndarray, "*batch count"], entries: Entries
) -> Retrieved:
    """With the tokens that followed the entries; those that are not alive are MISSING already."""
    tokens = entries.tokens_of(ids).clip(0)
    arrays = (tokens.astype(np.int64), np.array(distances), np.array(ids, np.int64))
    return Retrieved(*map(torch.from_numpy, arrays))


def advance_neighbours(before: Retrieved, came: Int[Tensor, "n"], entries: Entries) -> Retrieved:
    """One token later, without a search: the entries that follow those neighbours that were right about the token that
    came, with the distances that these had."""
    ids = before.ids.cpu().numpy()
    held = entries.documents_held
    right = (before.there & (before.tokens == came[:, None])).cpu().numpy()
    follows = right & (held.index_of(ids) == held.index_of(ids + 1)) & (entries.rows(ids + 1) >= 0)
    distances = np.where(follows, before.distances.cpu().numpy(), np.inf).astype(np.float32)
    order = np.argsort(distances, axis=-1, kind="stable")
    moved = np.take_along_axis(np.where(follows, ids + 1, MISSING), order, -1)
    return look_up(moved, np.take_along_axis(distances, order, -1), entries).to(before.tokens.device)


class Retriever:
    """Neighbours of one split's positions, as of the memory's version when it was made."""

    def __init__(self, table: NeighbourTable, split: Split, count: int):
        ids, distances = table.array(f"{split}.ids"), table.array(f"{split}.distances")
        if count > ids.shape[1]:
            raise InputError(
                f"{table.directory} holds {ids.shape[1]} neighbours of each {split} position, {count} are asked for; "
                f"raise neighbours.{'count' if split == 'train' else 'held_out'} or ask for fewer"
            )
        self._ids, self._distances = ids[:, :count], distances[:, :count]
        self._entries = table.memory.entries()

    def __call__(self, positions: Int[np.ndarray, "*batch"]) -> Retrieved:
        flat = positions.reshape(-1)
        ids, distances = self._ids[flat].astype(np.int64), self._distances[flat]
        ids, distances = without_the_forgotten(ids, distances, self._entries)
        shape = (*positions.shape, ids.shape[1])
        return look_up(ids.reshape(shape), distances.reshape(shape), self._entries)
