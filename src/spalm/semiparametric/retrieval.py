"""From a position to the tokens that followed its neighbours: a look-up in the table, once that is made."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.corpus import Split
from spalm.errors import InputError
from spalm.memory import Entries
from spalm.neighbours import NeighbourTable
from spalm.neighbours.table import without_the_forgotten


@dataclass(frozen=True)
class Retrieved:
    """The neighbours of some positions, nearest first: the tokens y_k that followed them, and how far away they are."""

    tokens: Int[Tensor, "*batch count"]
    distances: Float[Tensor, "*batch count"]
    """Squared; infinite where there is no such neighbour, whatever token stands there."""
    ids: Int[Tensor, "*batch count"]
    """The entries themselves; NOTHING where there is none."""

    @property
    def there(self) -> Bool[Tensor, "*batch count"]:
        return torch.isfinite(self.distances)

    def first(self, count: int) -> "Retrieved":
        return self[..., :count]

    def __getitem__(self, which) -> "Retrieved":
        return Retrieved(self.tokens[which], self.distances[which], self.ids[which])

    def to(self, device: torch.device) -> "Retrieved":
        return Retrieved(self.tokens.to(device), self.distances.to(device), self.ids.to(device))


def look_up(
    ids: Int[np.ndarray, "*batch count"], distances: Float[np.ndarray, "*batch count"], entries: Entries
) -> Retrieved:
    """With the tokens that followed the entries; those that are not alive are NOTHING already."""
    tokens = entries.tokens_of(ids).clip(0)
    arrays = (tokens.astype(np.int64), np.array(distances), np.array(ids, np.int64))
    return Retrieved(*map(torch.from_numpy, arrays))


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

    @torch.compiler.disable
    def __call__(self, positions: Int[np.ndarray, "*batch"]) -> Retrieved:
        flat = positions.reshape(-1)
        ids, distances = self._ids[flat].astype(np.int64), self._distances[flat]
        ids, distances = without_the_forgotten(ids, distances, self._entries)
        shape = (*positions.shape, ids.shape[1])
        return look_up(ids.reshape(shape), distances.reshape(shape), self._entries)
