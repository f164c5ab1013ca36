"""Tokens to a trained language model: the stage of the transformer and of transformer-XL."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spalm.artifact import Artifact, Stage
from spalm.compute import Execution
from spalm.corpus import Batch, Corpus
from spalm.lm.reading import Reading, log_probabilities
from spalm.lm.state import remembered
from spalm.lm.transformer import NetworkSettings, Transformer
from spalm.settings import Settings
from spalm.training import BEST, KEPT, Progress, TrainingSettings, TrainingTask, load_parameters, train, training_stage

KIND = "language model"
VERSION = 1
DEV_LANES = 16


class ModelSettings(Settings):
    network: NetworkSettings
    training: TrainingSettings
    keep_step: int | None = None
    """Also keep the parameters as they are after this many steps: SPALM takes over from there."""


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def segment_loss(model: Transformer, memory_length: int, batch: Batch, memory: list[Tensor]):
    """Summed cross-entropy of a segment, and the short-term memory after it."""
    hidden, layer_inputs = model(batch.inputs, memory or None)
    loss = model.vocabulary.loss(hidden.flatten(0, 1), batch.targets.flatten())
    return loss, remembered(memory or None, layer_inputs, memory_length)


def train_model(settings: ModelSettings, corpus: Corpus, directory: Path, execution: Execution) -> "TrainedModel":
    """Trains at `directory`, continues there, or finds the model trained before."""

    def make(where: Path) -> tuple[dict, list[str]]:
        model = Transformer(settings.network, corpus.vocabulary).initialise(settings.training.seed)
        task = TrainingTask(
            title=f"train {directory.name}",
            model=model,
            loss=lambda model, batch, memory: segment_loss(model, settings.training.memory_length, batch, memory),
            train=corpus.split("train"),
            dev_loss=lambda: dev_loss(model, corpus, settings),
            settings=settings.training,
            keep=settings.keep_step,
        )
        facts = training_facts(model, corpus, train(task, where, execution))
        return facts, [BEST, KEPT] if settings.keep_step else [BEST]

    stage = Stage(KIND, VERSION, settings.as_json(), {"corpus": corpus.digest})
    training_stage(stage, directory, make, execution)
    return TrainedModel(directory)


def training_facts(model: nn.Module, corpus: Corpus, progress: Progress) -> dict[str, Any]:
    """Returns what the manifest of a trained model says of it."""
    return {
        "vocabulary": corpus.vocabulary,
        "parameters": parameter_count(model),
        "best_dev_loss": progress.best_dev,
        "best_step": progress.best_step,
    }


def dev_loss(model: Transformer, corpus: Corpus, settings: ModelSettings) -> float:
    """Mean negative log-likelihood of (the first part of) dev, read as in training."""
    split = corpus.split("dev")
    training = settings.training
    stop = min(training.dev_tokens or len(split), len(split))
    reading = Reading.of(settings.network.layers, training.segment_length, training.memory_length, DEV_LANES)
    model.eval()
    found = log_probabilities(model, split, reading, range(stop))
    model.train()
    return -float(found.mean(dtype="float64"))


class TrainedModel(Artifact):
    """A trained model on disk: its settings, and the network itself by `load`."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, KIND)
        self.model_settings = ModelSettings.parse(self.settings, str(self.directory))

    @property
    def parameters(self) -> int:
        return self.facts["parameters"]

    def load(self, device: torch.device) -> Transformer:
        """The network, ready to be read with."""
        return self._filled(BEST).to(device).eval().requires_grad_(False)

    def kept(self) -> Transformer:
        """The network as it was after `keep_step` steps, ready to be trained on."""
        return self._filled(KEPT)

    def _filled(self, file: str) -> Transformer:
        model = Transformer(self.model_settings.network, self.facts["vocabulary"])
        load_parameters(model, self.directory / file)
        return model
