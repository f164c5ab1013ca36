"""Tokens to a trained language model: the stage of the transformer and of transformer-XL."""

from pathlib import Path

import torch
from torch import Tensor, nn

from spalm.artifact import Artifact
from spalm.corpus import Batch, Corpus
from spalm.learning import BEST, KEPT, Hardware, TrainingSettings, fit, load_parameters, training_stage
from spalm.lm.reading import Reading, log_probabilities
from spalm.lm.state import remembered
from spalm.lm.transformer import NetworkSettings, Transformer
from spalm.settings import Settings

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


def train_model(
    settings: ModelSettings,
    corpus: Corpus,
    directory: Path,
    name: str,
    hardware: Hardware,
    tensorboard: bool = False,
    restart: bool = False,
) -> "TrainedModel":
    """Trains at `directory`, continues there, or finds the model trained before."""

    def make(where: Path) -> tuple[dict, list[str]]:
        model = Transformer(settings.network, corpus.vocabulary).initialise(settings.training.seed)
        progress = fit(
            model,
            lambda model, batch, memory: segment_loss(model, settings.training.memory_length, batch, memory),
            corpus.split("train"),
            lambda: dev_loss(model, corpus, settings),
            settings.training,
            where,
            f"train {name}",
            hardware,
            tensorboard,
            keep=settings.keep_step,
        )
        facts = {
            "vocabulary": corpus.vocabulary,
            "parameters": parameter_count(model),
            "best_dev_loss": progress.best_dev,
            "best_step": progress.best_step,
        }
        return facts, [BEST, KEPT] if settings.keep_step else [BEST]

    parents = {"corpus": corpus.digest}
    training_stage(directory, KIND, VERSION, settings.as_json(), parents, make, restart, hardware.ranks)
    return TrainedModel(directory)


def dev_loss(model: Transformer, corpus: Corpus, settings: ModelSettings) -> float:
    """Mean negative log-likelihood of (the first part of) dev, read as in training."""
    split = corpus.split("dev")
    training = settings.training
    stop = min(training.dev_tokens or len(split), len(split))
    reading = Reading.of(settings.network.layers, training.segment_length, training.memory_length, DEV_LANES)
    model.eval()
    device = next(model.parameters()).device
    found = log_probabilities(model, split, reading, 0, stop, device)
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
