"""SPALM: a transformer-XL whose hidden states pass through a gate on their way to the output layer."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from spalm.lm import Transformer
from spalm.semiparametric.gate import Gate, GateSettings, Mixed
from spalm.semiparametric.retrieval import Retrieved


class Spalm(nn.Module):
    """`base` is read as any language model; `mix` turns its h_t into z_t, from which `base` predicts."""

    def __init__(self, base: Transformer, settings: GateSettings):
        super().__init__()
        self.base = base
        self.gate = Gate(settings, base.width)

    def initialise(self, seed: int) -> "Spalm":
        self.base.initialise(seed)
        self.gate.initialise()
        return self

    def attend_to(self, neighbours: int | None) -> "Spalm":
        """With so many neighbours from now on; None: as many as in training."""
        if neighbours is not None:
            self.gate.settings = self.gate.settings.model_copy(update={"neighbours": neighbours})
        return self

    def mix(self, hidden: Float[Tensor, "*batch width"], retrieved: Retrieved) -> Mixed:
        return self.gate(hidden, retrieved, self.base)

    def forward(
        self, tokens: Int[Tensor, "batch time"], memory: list[Tensor] | None, retrieved: Retrieved
    ) -> tuple[Float[Tensor, "batch time width"], list[Tensor]]:
        """z of a segment, and every layer's inputs."""
        hidden, layer_inputs = self.base(tokens, memory)
        return self.mix(hidden, retrieved).vectors, layer_inputs

    @property
    def device(self) -> torch.device:
        return self.gate.gate.weight.device
