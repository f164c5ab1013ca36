"""The loop that any of our models trains in: optimiser and schedule, checkpoints, run log, hardware, ranks."""

from spalm.learning.checkpoint import load_parameters
from spalm.learning.device import Hardware, autocast, give_back_freed_memory, keep_freed_memory
from spalm.learning.loop import BEST, KEPT, TrainingSettings, fit
from spalm.learning.optimiser import OptimiserSettings
from spalm.learning.ranks import Ranks, ranks_of_torchrun
from spalm.learning.stage import training_stage

__all__ = [
    "BEST",
    "KEPT",
    "Hardware",
    "OptimiserSettings",
    "Ranks",
    "TrainingSettings",
    "autocast",
    "fit",
    "give_back_freed_memory",
    "keep_freed_memory",
    "load_parameters",
    "ranks_of_torchrun",
    "training_stage",
]
