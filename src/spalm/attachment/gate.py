"""The paper's gate on a network that is not trained with it: only the gate learns, through the frozen output layer."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from spalm.console import bar
from spalm.lm.pretrained import Pretrained
from spalm.semiparametric.adaptive import TrainingExamples
from spalm.semiparametric.fitting import fit_network
from spalm.semiparametric.gate import Gate, GateSettings
from spalm.settings import Settings

_ROWS = 256


class GateTraining(Settings):
    passes: int = Field(default=2, gt=0)
    """Times that it reads the positions it learns from."""
    batch_size: int = Field(default=256, gt=0)
    """Positions of a step: their logits are held."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Highest learning rate; it falls along a cosine to nothing."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    seed: int = Field(default=1, ge=0)
    """Of the order of the positions."""


def learn_gate(settings: GateSettings, training: GateTraining, model: Pretrained, examples: TrainingExamples) -> Gate:
    torch.manual_seed(training.seed)
    gate = Gate(settings, model.width).initialise().to(model.device)
    steps = training.passes * -(-len(examples) // training.batch_size)
    with bar("train the gate", steps) as shown:

        def loss_of(rows: Tensor) -> Tensor:
            shown.advance()
            return -_target_log_probabilities(gate, model, examples[rows]).mean()

        fit_network(gate, training, len(examples), loss_of, torch.Generator().manual_seed(training.seed))
    return gate


@torch.no_grad()
def gate_log_probabilities(gate: Gate, model: Pretrained, examples: TrainingExamples) -> Tensor:
    """log p of what came, through the gate."""
    parts = (examples[rows] for rows in torch.arange(len(examples)).split(_ROWS))
    return torch.cat([_target_log_probabilities(gate, model, part).cpu() for part in parts])


def _target_log_probabilities(gate: Gate, model: Pretrained, part: TrainingExamples) -> Tensor:
    retrieved = part.retrieved.nearest(gate.settings.attended).to(model.device)
    mixed = gate(part.base.hidden.to(model.device), retrieved, model)
    return -F.cross_entropy(model.logits(mixed.vectors), part.targets.to(model.device), reduction="none")
