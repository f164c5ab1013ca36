"""Training steps of one model as the training loop makes them, for benchmarks."""

import time

import torch
from torch import nn

from spalm.compute import Hardware
from spalm.corpus import Batch
from spalm.training import OptimiserSettings
from spalm.training.gradients import GradientAccumulator, LaneMemories
from spalm.training.optimiser import make_optimiser
from spalm.training.replica import Loss, Replica


class TrainingSteps:
    """Makes training steps of one model, one after another, and measures their time."""

    def __init__(self, model: nn.Module, loss: Loss, optimiser: OptimiserSettings, *, lanes: int, bf16: bool = False):
        replica = Replica(model, loss, torch.device("cpu"), hardware=Hardware())
        self.model, self._clip = model, optimiser.clip
        self._accumulator = GradientAccumulator(replica, lanes, None, bf16=bf16)
        self._optimiser = make_optimiser(optimiser, model, bf16=bf16, threads=self._accumulator.threads)
        self._memories: LaneMemories = []

    def step(self, batch: Batch) -> float:
        """Makes a training step (forward, backward, clipping, update) and returns its seconds."""
        began = time.perf_counter()
        _, self._memories = self._accumulator.add(batch, self._memories)
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return time.perf_counter() - began
