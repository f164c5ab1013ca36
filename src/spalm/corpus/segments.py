"""Training batches: the training split as contiguous lanes of text, read side by side, a segment at a time."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spalm.corpus.tokens import TokenSplit
from spalm.errors import InputError


@dataclass(frozen=True)
class Batch:
    """One segment of every lane."""

    positions: Int[np.ndarray, "lanes time"]
    """Positions in the split, by which neighbours and the like are looked up."""
    inputs: Int[Tensor, "lanes time"]
    """Token before each position."""
    targets: Int[Tensor, "lanes time"]
    """Token at each position, which is to be predicted."""

    def lanes(self, start: int, stop: int) -> "Batch":
        """Returns the lanes `start` to `stop` - 1."""
        return Batch(self.positions[start:stop], self.inputs[start:stop], self.targets[start:stop])

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch on a device."""
        return Batch(self.positions, self.inputs.to(device), self.targets.to(device))


class TrainingBatches:
    """Cuts a split into `lanes` equal contiguous lanes; segment s of lane l follows segment s-1 of lane l in the text.

    Every epoch begins at another offset (drawn from the seed and the epoch, nothing else), so that the borders of
    segments fall elsewhere and no text is always left over. A batch is a function of the step alone: resuming needs no
    state. `own` are the lanes that this process reads if other processes read the rest; default: all lanes.
    """

    def __init__(self, split: TokenSplit, lanes: int, segment: int, *, seed: int, own: range | None = None):
        self._split, self._segment, self._seed = split, segment, seed
        self._lane_length = len(split) // lanes
        self.segments_per_epoch = self._lane_length // segment
        if self.segments_per_epoch == 0:
            raise InputError(
                f"the {split.split} split has {len(split):,} tokens, {lanes} lanes of one segment of {segment} need "
                f"{lanes * segment:,}; give more text, or smaller training.batch_size or training.segment_length"
            )
        self._lanes = np.arange(lanes) if own is None else np.array(own)

    def starts_epoch(self, step: int) -> bool:
        """Returns whether the text jumps at this step, so that a carried memory must be emptied."""
        return step % self.segments_per_epoch == 0

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step."""
        epoch, segment = divmod(step, self.segments_per_epoch)
        offset = int(np.random.default_rng([self._seed, epoch]).integers(len(self._split))) if epoch else 0
        lane_starts = offset + self._lanes * self._lane_length
        within = segment * self._segment + np.arange(self._segment)
        positions = (lane_starts[:, None] + within) % len(self._split)
        return Batch(
            positions,
            torch.from_numpy(self._split.inputs(positions)),
            torch.from_numpy(self._split.targets(positions)),
        )
