"""The frozen pretrained model that a memory is attached to, and the way it reads text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from spalm.compute import Hardware, SentByFields
from spalm.console import bar, say
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.lm import Reading
from spalm.lm.pretrained import (
    Backend,
    LlamaModel,
    PretrainedFolder,
    PretrainedModel,
    lanes_of,
    open_with,
    usable_backends,
    usable_for,
)
from spalm.memory import Encoder

_ENTRIES_PER_SHARD = 1 << 13
"""Number of entries after which keys are written to disk; it is low, as a pretrained model is slow."""
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
    keys_by: Backend = field(default_factory=Backend)
    """The backend that makes the keys of the memory."""

    @cached_property
    def model(self) -> PretrainedModel | LlamaModel:
        """The model that makes keys and with which texts are scored, loaded when it is first used."""
        return self._open(usable_for(self.keys_by, self.folder, self.hardware))

    @cached_property
    def _opened(self) -> dict[Backend, PretrainedModel | LlamaModel]:
        """The models that were opened."""
        return {}

    def _open(self, backend: Backend) -> PretrainedModel | LlamaModel:
        if backend not in self._opened:
            self._opened[backend] = open_with(backend, self.folder, self.hardware)
        return self._opened[backend]

    @cached_property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self.hardware.prepare()

    @cached_property
    def encoder(self) -> Encoder:
        """The model as an encoder: its hidden states are the keys of the memory."""
        return self._encoder_by(self.model, lambda: self.model)

    @cached_property
    def generator(self) -> PretrainedModel | LlamaModel:
        """The model as it generates text: by the backend that the hardware names, or the fastest that works here."""
        first, *faster = usable_backends(self.folder, self.hardware)
        for backend in reversed(faster):
            try:
                return self._open(backend)
            except InputError as error:
                say(f"{error}; the model is run in another way")
        return self._open(first)

    @cached_property
    def query_encoder(self) -> Encoder:
        """The encoder of texts that are generated: the hidden states of the model that generates them."""
        return self._encoder_by(self.generator, lambda: self.generator)

    def _encoder_by(
        self, model: PretrainedModel | LlamaModel, load: Callable[[], PretrainedModel | LlamaModel]
    ) -> Encoder:
        """Returns an encoder that reads with this model; `load` returns it, in another process too."""
        context = min(self.context, model.context_length or self.context)
        reading = Reading(context, 0, min(self.stride, context), lanes_of(model, _LANES_ON_GPU), 0, by_document=True)
        return Encoder(
            digest=self.digest,
            width=model.width,
            vocabulary=model.vocabulary,
            reading=reading,
            load=load,
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
