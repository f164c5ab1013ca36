"""The loop that any of our models trains in: optimiser and schedule, checkpoint and resume, run log, hardware."""

from spalm.learning.checkpoint import load_parameters
from spalm.learning.device import Hardware, autocast, give_back_freed_memory, keep_freed_memory
from spalm.learning.loop import BEST, KEPT, Loss, TrainingSettings, fit
from spalm.learning.optimiser import OptimiserSettings

__all__ = [
    "BEST",
    "KEPT",
    "Hardware",
    "Loss",
    "OptimiserSettings",
    "TrainingSettings",
    "autocast",
    "fit",
    "give_back_freed_memory",
    "keep_freed_memory",
    "load_parameters",
]
