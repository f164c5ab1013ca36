"""A model and a text in, a trained model out: loop, optimiser and schedule, checkpoints, run log."""

from spalm.training.checkpoint import Progress, load_parameters
from spalm.training.loop import BEST, KEPT, TrainingSettings, TrainingTask, train
from spalm.training.optimiser import OptimiserSettings
from spalm.training.stage import training_stage

__all__ = [
    "BEST",
    "KEPT",
    "OptimiserSettings",
    "Progress",
    "TrainingSettings",
    "TrainingTask",
    "load_parameters",
    "train",
    "training_stage",
]
