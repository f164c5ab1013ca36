"""The stage that trains a transformer or transformer-XL: from a corpus to a language model on disk."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from pydantic import BaseModel
from torch import Tensor, nn

from spalm.artifact import Artifact, Stage
from spalm.compute import Execution
from spalm.corpus import Batch, Corpus
from spalm.lm.reading import Reading, log_probabilities
from spalm.lm.state import next_memory
from spalm.lm.transformer import NetworkSettings, Transformer
from spalm.manifest import Count, Size
from spalm.settings import Settings
from spalm.training import (
    BEST_FILE,
    KEPT_FILE,
    Progress,
    TrainingSettings,
    TrainingTask,
    load_network,
    run_training_stage,
    train,
)

KIND = "language model"
"""Kind of artifact."""
VERSION = 1
"""Version of the files' format."""
DEV_LANES = 16
"""Number of places of dev that are read side by side during training."""


class ModelSettings(Settings):
    """Settings of a language model and of its training."""

    network: NetworkSettings
    """Architecture."""
    training: TrainingSettings
    """Training run."""
    keep_step: int | None = None
    """Number of steps after which the parameters are also kept: SPALM continues from there. None: never."""


def parameter_count(model: nn.Module) -> int:
    """Returns the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def segment_loss(
    model: Transformer, memory_length: int, batch: Batch, *, memory: list[Tensor]
) -> tuple[Float[Tensor, ""], list[Tensor]]:
    """Returns the summed cross-entropy of a segment, and the short-term memory after it."""
    hidden, layer_inputs = model(batch.inputs, memory or None)
    loss = model.vocabulary.loss(hidden.flatten(0, 1), batch.targets.flatten())
    return loss, next_memory(memory or None, layer_inputs, memory_length)


def train_model(settings: ModelSettings, corpus: Corpus, directory: Path, *, execution: Execution) -> "TrainedModel":
    """Trains a model at `directory`, continues there, or opens the model that was trained before."""

    def make(where: Path) -> tuple[dict, list[str]]:
        model = Transformer(settings.network, corpus.vocabulary).initialise(settings.training.seed)
        task = TrainingTask(
            title=f"train {directory.name}",
            model=model,
            loss=lambda model, batch, memory: segment_loss(
                model, settings.training.memory_length, batch, memory=memory
            ),
            train=corpus.split("train"),
            dev_loss=lambda: dev_loss(model, corpus, settings),
            settings=settings.training,
            keep_step=settings.keep_step,
        )
        facts = training_facts(model, corpus, train(task, where, execution))
        return facts, [BEST_FILE, KEPT_FILE] if settings.keep_step else [BEST_FILE]

    stage = Stage(KIND, VERSION, settings.as_json(), {"corpus": corpus.digest})
    run_training_stage(stage, directory, make, execution=execution)
    return TrainedModel(directory)


def training_facts(model: nn.Module, corpus: Corpus, progress: Progress) -> dict[str, Any]:
    """Returns the facts about a trained model that its manifest keeps."""
    return {
        "vocabulary": corpus.vocabulary,
        "parameters": parameter_count(model),
        "best_dev_loss": progress.best_dev,
        "best_step": progress.best_step,
    }


def dev_loss(model: Transformer, corpus: Corpus, settings: ModelSettings) -> float:
    """Returns the mean negative log-likelihood of dev, or of its first tokens, read as in training."""
    split = corpus.split("dev")
    training = settings.training
    stop = min(training.dev_tokens or len(split), len(split))
    reading = Reading.of(
        settings.network.layers, segment=training.segment_length, memory=training.memory_length, lanes=DEV_LANES
    )
    model.eval()
    found = log_probabilities(model, split, reading, positions=range(stop))
    model.train()
    return -float(found.mean(dtype="float64"))


class TrainingFacts(BaseModel):
    """The form of the facts about a trained model."""

    vocabulary: Size
    parameters: Count
    best_dev_loss: float | None
    best_step: int | None


class TrainedModel(Artifact):
    """A trained model on disk: its settings, and the network itself through `load`."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, KIND, TrainingFacts)
        self.model_settings = ModelSettings.parse(self.settings, str(self.directory))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.facts["parameters"]

    def load(self, device: torch.device) -> Transformer:
        """Returns the network, frozen and ready to read text."""
        return self._filled(BEST_FILE).to(device).eval().requires_grad_(requires_grad=False)

    def kept(self) -> Transformer:
        """Returns the network as it was after `keep_step` steps, ready to be trained further."""
        return self._filled(KEPT_FILE)

    def _filled(self, file: str) -> Transformer:
        """Returns the network with the parameters of a file."""
        network, vocabulary = self.model_settings.network, self.facts["vocabulary"]
        return load_network(lambda: Transformer(network, vocabulary), self.directory / file)
