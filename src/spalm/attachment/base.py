"""The frozen pretrained model that a memory is attached to, and the way it reads text."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from spalm.compute import Hardware, SentByFields, available_cores
from spalm.console import bar
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.lm import Reading
from spalm.lm.pretrained import LlamaModel, PretrainedFolder, PretrainedModel
from spalm.memory import Encoder

_ENTRIES_PER_SHARD = 1 << 13
"""Number of entries after which keys are written to disk; it is low, as a pretrained model is slow."""
_LONGEST_TEXT = 8192
"""Highest number of tokens for which llama.cpp keeps room, even if the model could read more."""
_LANES_ON_GPU = 16
"""Number of windows that a GPU reads side by side."""


@dataclass(frozen=True)
class PretrainedBase(SentByFields):
    """A pretrained model on disk and the way it reads."""

    folder: PretrainedFolder
    digest: str
    hardware: Hardware
    context: int
    """Number of tokens in a window, at most as many as the model can read."""
    stride: int
    """Number of new tokens in each further window of a document."""

    @cached_property
    def model(self) -> PretrainedModel:
        """The model, loaded when it is first used."""
        return self.folder.load(self.device)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self.hardware.prepare()

    @cached_property
    def encoder(self) -> Encoder:
        """The model as an encoder: its hidden states are the keys of the memory."""
        lanes = torch.get_num_threads() if self.device.type == "cpu" else _LANES_ON_GPU
        return self._encoder_by(self.model, lanes)

    @cached_property
    def generator(self) -> PretrainedModel | LlamaModel:
        """The model as it generates text: run by llama.cpp if the hardware's `backend` says so."""
        if self.hardware.backend == "torch":
            return self.model
        if self.folder.gguf is None:
            raise InputError("--backend llama: the model did not come as a GGUF file, or that is gone; attach it again")
        threads = self.hardware.threads or available_cores()
        return LlamaModel(self.folder.gguf, threads=threads, context=_LONGEST_TEXT)

    @cached_property
    def query_encoder(self) -> Encoder:
        """The encoder of texts that are generated: the hidden states of the model that generates them."""
        return self.encoder if isinstance(self.generator, PretrainedModel) else self._encoder_by(self.generator, 1)

    def _encoder_by(self, model: PretrainedModel | LlamaModel, lanes: int) -> Encoder:
        """Returns an encoder that reads with this model."""
        context = min(self.context, model.context_length or self.context)
        return Encoder(
            digest=self.digest,
            width=model.width,
            vocabulary=model.vocabulary,
            reading=Reading(context, 0, min(self.stride, context), lanes, warm_up=0, by_document=True),
            load=lambda: model,
            device=lambda: self.device,
            entries_per_shard=_ENTRIES_PER_SHARD,
        )

    def hidden(self, stream: TokenStream, title: str) -> Float[Tensor, "n width"]:
        """Returns the hidden state of every position of a text."""
        found = torch.zeros(len(stream), self.model.width)
        with bar(title, len(stream)) as shown:
            for positions, states in self.encoder.hidden(stream, 0, len(stream)):
                found[positions] = states.float().cpu()
                shown.advance(len(positions))
        return found
