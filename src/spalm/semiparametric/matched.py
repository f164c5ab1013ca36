"""Exact matches of some positions as evidence for the next token, and features by which a mixture weighs them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spalm.corpus import TokenSplit
from spalm.memory import MISSING, Memory
from spalm.memory.exact import LEAST_COUNTS, OCCURRENCES, Excluded, Matches, reversed_contexts

LEVELS = len(LEAST_COUNTS)
"""Number of matches of each position: the longest, and shorter ones that stand at more places."""
FEATURES = 7
"""Number of features of each match."""


@dataclass(frozen=True)
class Matched:
    """The exact matches of some positions, longest first: how long they are, how often they occur, what followed."""

    tokens: Int[Tensor, "*batch levels occurrences"]
    """Tokens that followed at some of the places; arbitrary where there are fewer places."""
    ids: Int[Tensor, "*batch levels occurrences"]
    """Ids of the entries that hold these tokens; MISSING where there are fewer."""
    lengths: Float[Tensor, "*batch levels"]
    """Number of tokens of each match; 0 where nothing matches."""
    counts: Float[Tensor, "*batch levels"]
    """Number of places where each match stands."""

    @classmethod
    def of(cls, matches: Matches) -> "Matched":
        """Returns the matches that an index has found, as tensors."""
        lengths, counts = (array.astype(np.float32) for array in (matches.lengths, matches.counts))
        # Converted by numpy: for one position an operation of torch takes longer than all of this.
        return cls(*map(torch.from_numpy, (np.maximum(matches.tokens, 0), matches.ids, lengths, counts)))

    @classmethod
    def nothing(cls, rows: int) -> "Matched":
        """Returns no matches at all for each of `rows` positions."""
        ids, numbers = torch.full((rows, LEVELS, OCCURRENCES), MISSING), torch.zeros(rows, LEVELS)
        return cls(torch.zeros_like(ids), ids, numbers, numbers)

    @property
    def present(self) -> Bool[Tensor, "*batch levels occurrences"]:
        """Mask of the occurrences that exist."""
        return self.ids != MISSING

    def __getitem__(self, rows) -> "Matched":
        return Matched(self.tokens[rows], self.ids[rows], self.lengths[rows], self.counts[rows])

    def to(self, device: torch.device) -> "Matched":
        """Returns the same matches on a device."""
        if self.ids.device == device:
            return self
        return Matched(*(each.to(device) for each in (self.tokens, self.ids, self.lengths, self.counts)))

    def features(
        self, of_matched: Float[Tensor, "*batch levels occurrences"], entropy: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch features"]:
        """Returns features of the matches, given log p of their tokens under the base, and the base's entropy."""
        present = self.present
        number = present.sum(-1).clamp_min(1)
        same = (self.tokens[..., :, None] == self.tokens[..., None, :]) & present[..., None, :] & present[..., :, None]
        votes = same.sum(-1)
        peak, top = votes.max(-1)
        log_top = of_matched.gather(-1, top[..., None])[..., 0]
        mean_log = (of_matched * present).sum(-1) / number
        distinct = (present / votes.clamp_min(1)).sum(-1)
        each = [
            (self.lengths + 1).log(),
            (self.counts + 1).log(),
            peak / number,
            distinct.log1p(),
            torch.where(self.lengths > 0, log_top, -entropy[..., None]),
            torch.where(self.lengths > 0, mean_log, -entropy[..., None]),
            (self.lengths > 8).float(),
        ]
        return torch.stack(each, -1).flatten(-2)


@dataclass(frozen=True)
class Matcher:
    """Finds the exact matches of the positions of a split in a memory."""

    memory: Memory
    split: TokenSplit

    def __call__(self, positions: Int[np.ndarray, "n"], excluded: Excluded | None = None) -> Matched:
        """Returns the matches of some positions."""
        return Matched.of(self.memory.exact.current().find(reversed_contexts(self.split, positions), excluded))
