"""A model and a text in, a trained model out: loop, optimiser and schedule, checkpoints, run log."""

from spalm.training.checkpoint import Progress, load_network
from spalm.training.gradients import RandomLayer
from spalm.training.loop import BEST_FILE, KEPT_FILE, TrainingSettings, TrainingTask, train
from spalm.training.optimiser import OptimiserSettings
from spalm.training.stage import run_training_stage

__all__ = [
    "BEST_FILE",
    "KEPT_FILE",
    "OptimiserSettings",
    "Progress",
    "RandomLayer",
    "TrainingSettings",
    "TrainingTask",
    "load_network",
    "run_training_stage",
    "train",
]
