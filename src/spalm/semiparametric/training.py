"""Training of SPALM: from a transformer-XL and a table of neighbours to a trained model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from spalm.artifact import Artifact, Stage
from spalm.compute import Execution
from spalm.corpus import Batch, Corpus, Split
from spalm.errors import InputError
from spalm.lm import ModelSettings, Reading, TrainedModel, Transformer, next_memory
from spalm.lm.training import DEV_LANES, TrainingFacts, training_facts
from spalm.neighbours import NeighbourTable
from spalm.semiparametric.gate import GateSettings
from spalm.semiparametric.model import Spalm
from spalm.semiparametric.retrieval import Retrieved, Retriever
from spalm.semiparametric.scorer import Scorer, mean_loss
from spalm.settings import Settings
from spalm.training import BEST_FILE, TrainingTask, load_network, run_training_stage, train

KIND = "semiparametric language model"
_VERSION = 1


class SpalmSettings(Settings):
    """Settings of SPALM beyond those of its transformer-XL."""

    gate: GateSettings = GateSettings()
    """The gate through which retrieved tokens enter."""
    start: float = Field(default=0.6, ge=0, lt=1)
    """Share of the training steps that transformer-XL makes: SPALM takes over its parameters there and makes the rest.
    With 0 it is trained from scratch."""

    def first_step(self, steps: int) -> int:
        """Returns the step at which SPALM takes over: 0 only if `start` is 0, and before the last step."""
        return min(max(1, round(self.start * steps)), steps - 1) if self.start else 0


class SpalmModelSettings(ModelSettings):
    """Settings of a SPALM: those of its transformer-XL, and its gate."""

    spalm: SpalmSettings

    @property
    def first_step(self) -> int:
        """The training step at which SPALM takes over from transformer-XL; 0 if it is trained from scratch."""
        return self.spalm.first_step(self.training.steps)


_SAMPLE = 1 << 14
"""Number of training positions from which the usual distance of a neighbour is found."""

RetrieveFunction = Callable[[np.ndarray], Retrieved]
"""A function from positions to their neighbours."""


def spalm_segment_loss(
    model: Spalm, retrieve: RetrieveFunction, memory_length: int, *, batch: Batch, memory: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the summed cross-entropy of a segment, and the short-term memory after it."""
    retrieved = retrieve(batch.positions).to(batch.inputs.device)
    output, layer_inputs = model(batch.inputs, memory or None, retrieved)
    return model.loss(output, batch.targets), next_memory(memory or None, layer_inputs, memory_length)


def train_spalm(
    settings: SpalmModelSettings,
    start: TrainedModel | None,
    corpus: Corpus,
    *,
    table: NeighbourTable,
    directory: Path,
    execution: Execution,
) -> "TrainedSpalm":
    """Trains a SPALM at `directory`, or finds it there; a killed training continues.

    It starts from the parameters that `start` kept at the step where SPALM takes over, or from scratch.
    """
    training, gate = settings.training, settings.spalm.gate
    if (settings.first_step > 0) != (start is not None):
        raise InputError(f"spalm.start = {settings.spalm.start}: transformer-XL's parameters go with a start above 0")

    def make(where: Path) -> tuple[dict, list[str]]:
        model = Spalm(Transformer(settings.network, corpus.vocabulary), gate).initialise(training.seed)
        if start is not None:
            model.base = start.kept()
        if not gate.neighbours:
            model.gate.requires_grad_(requires_grad=False)  # no gradient reaches it
        retriever = Retriever(table, "train", gate.attended)
        if gate.uses_usual_distance:
            model.gate.fit_usual_distance(retriever(_sample(len(corpus.split("train")))).distances)
        retrieve: RetrieveFunction = retriever
        if execution.hardware.compile:
            # Reading from disk cannot be compiled.
            retrieve = torch.compiler.disable(retrieve.__call__)  # pyright: ignore[reportAssignmentType]
        reading = Reading.of(
            settings.network.layers, segment=training.segment_length, memory=training.memory_length, lanes=DEV_LANES
        )
        dev = corpus.split("dev")
        retrievers: dict[Split, Retriever] = {"dev": Retriever(table, "dev", gate.attended)}
        scorer = Scorer(model.base, model.gate, retrievers, log_probabilities_only=True)

        def loss(model: Any, batch: Batch, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            return spalm_segment_loss(model, retrieve, training.memory_length, batch=batch, memory=memory)

        def dev_loss() -> float:
            model.eval()
            found = mean_loss(scorer, dev, reading, stop=min(training.dev_tokens or len(dev), len(dev)))
            model.train()
            return found

        task = TrainingTask(
            title=f"train {directory.name}",
            model=model,
            loss=loss,
            train=corpus.split("train"),
            dev_loss=dev_loss,
            settings=training,
            first_step=settings.first_step,
        )
        return training_facts(model, corpus, train(task, where, execution)), [BEST_FILE]

    parents = {"corpus": corpus.digest, "neighbours": table.digest}
    parents |= {} if start is None else {"start": start.digest}
    run_training_stage(Stage(KIND, _VERSION, settings.as_json(), parents), directory, make, execution=execution)
    return TrainedSpalm(directory)


def _sample(count: int) -> np.ndarray:
    """Returns positions spread evenly over `count`."""
    return np.linspace(0, count - 1, min(count, _SAMPLE)).astype(np.int64)


class TrainedSpalm(Artifact):
    """A trained SPALM on disk: its settings, and `load` for the model itself."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, KIND, TrainingFacts)
        self.model_settings = SpalmModelSettings.parse(self.settings, str(self.directory))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.facts["parameters"]

    def load(self, device: torch.device) -> Spalm:
        """Returns the model on a device, frozen and in evaluation mode."""
        network, gate = self.model_settings.network, self.model_settings.spalm.gate
        model = load_network(
            lambda: Spalm(Transformer(network, self.facts["vocabulary"]), gate), self.directory / BEST_FILE
        )
        return model.to(device).eval().requires_grad_(requires_grad=False)
