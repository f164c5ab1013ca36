"""Training of the paper's gate on a frozen network: only the gate learns, through the frozen output layer."""

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from spalm.console import bar
from spalm.lm import LanguageModel
from spalm.semiparametric import Gate, GateSettings, TrainingExamples
from spalm.semiparametric.fit_network import fit_network
from spalm.settings import Seed, Settings

_BATCH = 256
"""Positions that are scored at a time."""


class GateTrainingSettings(Settings):
    """How the gate is trained."""

    passes: int = Field(default=2, gt=0)
    """Passes over the training positions."""
    batch_size: int = Field(default=256, gt=0)
    """Number of positions in a training step; the logits of all of them are in memory at once."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Highest learning rate; it falls to 0 along a cosine."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    seed: Seed = 1
    """Seed of the order of the positions."""


def learn_gate(
    settings: GateSettings, training: GateTrainingSettings, model: LanguageModel, *, examples: TrainingExamples
) -> Gate:
    """Returns a gate trained on these positions."""
    torch.manual_seed(training.seed)
    gate = Gate(settings, model.width).initialise()
    gate.fit_usual_distance(examples.retrieved.distances)
    gate.to(model.device)
    steps = training.passes * -(-len(examples) // training.batch_size)
    with bar("train the gate", steps) as shown:

        def loss_of(rows: Tensor) -> Tensor:
            shown.advance()
            return -_target_log_probabilities(gate, model, examples[rows]).mean()

        fit_network(gate, training, len(examples), loss_of=loss_of, order=torch.Generator().manual_seed(training.seed))
    return gate


@torch.no_grad()
def gate_log_probabilities(gate: Gate, model: LanguageModel, examples: TrainingExamples) -> Float[Tensor, "n"]:
    """Returns log p of the actual token at each position, through the gate."""
    batches = examples.batches(_BATCH)
    return torch.cat([_target_log_probabilities(gate, model, batch).cpu() for batch in batches])


def _target_log_probabilities(gate: Gate, model: LanguageModel, batch: TrainingExamples) -> Float[Tensor, "n"]:
    retrieved = batch.retrieved.nearest(gate.settings.attended).to(model.device)
    output = gate(batch.base.hidden.to(model.device), retrieved, model)
    return output.target_log_probabilities(model, batch.targets.to(model.device))
