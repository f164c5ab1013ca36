"""SPALM: a transformer-XL whose hidden states pass through a gate on their way to the output layer."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from spalm.lm import Transformer
from spalm.semiparametric.gate import Gate, GateOutput, GateSettings
from spalm.semiparametric.retrieval import Retrieved


class Spalm(nn.Module):
    """A transformer-XL with a gate: `base` computes h_t, the gate turns it into z_t, from which `base` predicts."""

    def __init__(self, base: Transformer, settings: GateSettings):
        super().__init__()
        self.base = base
        self.gate = Gate(settings, base.width)

    def initialise(self, seed: int) -> "Spalm":
        """Draws the network's parameters and sets the gate's."""
        self.base.initialise(seed)
        self.gate.initialise()
        return self

    def set_neighbours(self, neighbours: int | None) -> "Spalm":
        """Changes the number of neighbours that are attended to; None leaves it as in training."""
        if neighbours is not None:
            self.gate.settings = self.gate.settings.model_copy(update={"neighbours": neighbours})
        return self

    def apply_gate(self, hidden: Float[Tensor, "*batch width"], retrieved: Retrieved) -> GateOutput:
        """Returns z_t and the gate's values."""
        return self.gate(hidden, retrieved, self.base)

    def forward(
        self, tokens: Int[Tensor, "batch time"], memory: list[Tensor] | None, retrieved: Retrieved
    ) -> tuple[GateOutput, list[Tensor]]:
        """Returns the gate's output for a segment, and the inputs of every layer."""
        hidden, layer_inputs = self.base(tokens, memory)
        return self.apply_gate(hidden, retrieved), layer_inputs

    def loss(self, output: GateOutput, targets: Int[Tensor, "batch time"]) -> Float[Tensor, ""]:
        """Returns minus the sum of the targets' log-probabilities."""
        vectors, wanted = output.vectors.flatten(0, 1), targets.flatten()
        if output.copied is None:
            return self.base.vocabulary.loss(vectors, wanted)
        costs = self.base.vocabulary.loss(vectors, wanted, "none")
        return -output.copied.flatten().target_log_probabilities(-costs, wanted).sum()

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.gate.gate.weight.device
