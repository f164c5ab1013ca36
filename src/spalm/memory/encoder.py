"""The encoder: a frozen language model whose hidden states are keys, and the way it reads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import Field

from spalm.compute import ProgressCallback, SentByFields
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.lm import LanguageModel, Reading, TrainedModel, hidden_states
from spalm.lm.reading import PositionsAndHidden
from spalm.settings import Settings


class MemorySettings(Settings):
    """Settings of how a language model reads text to make keys."""

    stride: int | None = Field(default=None, gt=0)
    """Number of new tokens in each window of one segment; the rest is left context. Default: half a segment."""
    carried: int = Field(default=0, ge=0)
    """Length of a short-term memory carried from segment to segment, instead of overlapping windows; 0: windows."""
    key_width: int | None = Field(default=None, gt=0)
    """Number of dimensions that keys are reduced to, by a projection learned from them; default: keep them whole."""
    lanes: int = Field(default=16, gt=0)
    """Number of places of the text read side by side. It changes the speed, not the keys."""

    def stride_in(self, segment: int) -> int:
        """Returns the number of new tokens in a window of `segment` tokens."""
        stride = self.stride or -(-segment // 2)
        if stride > segment:
            raise InputError(f"memory.stride = {stride}: windows have {segment} tokens; give at most that")
        return stride


@dataclass(frozen=True)
class Encoder(SentByFields):
    """Reads text with a language model and gives a hidden state for each position."""

    digest: str
    """Digest of the model."""
    width: int
    """Number of dimensions of a hidden state."""
    vocabulary: int
    """Number of tokens in the model's vocabulary."""
    reading: Reading
    """Way of reading: windows or segments, and their lengths."""
    load: Callable[[], LanguageModel]
    """Loads the model."""
    device: Callable[[], torch.device]
    """Returns the device that the model computes on."""
    entries_per_shard: int | None = None
    """Entries of a shard, for models so slow that their work should be on disk sooner; default: the memory's own."""

    @cached_property
    def model(self) -> LanguageModel:
        """The model, loaded when it is first used."""
        return self.load()

    @property
    def gpus(self) -> int:
        """Number of GPUs that the model computes on."""
        return int(self.device().type == "cuda")

    @property
    def identity(self) -> dict[str, Any]:
        """Description of the keys: those of encoders with the same identity may be compared with each other."""
        reading = {"segment": self.reading.segment, "memory": self.reading.memory, "stride": self.reading.stride}
        if self.reading.by_document:
            reading["by_document"] = True
        return {
            "encoder": {"digest": self.digest, "width": self.width, "vocabulary": self.vocabulary},
            "reading": reading,
        }

    def hidden(self, stream: TokenStream, start: int, stop: int) -> Iterator[PositionsAndHidden]:
        """Yields (positions, hidden states) of [start, stop) in any order; `start` is a multiple of the stride."""
        return hidden_states(self.model, stream, self.reading, wanted=range(start, stop))

    def keys(
        self,
        stream: TokenStream,
        start: int,
        stop: int,
        *,
        to_keys: Callable[[torch.Tensor], np.ndarray],
        width: int,
        progress: ProgressCallback = lambda _: None,
    ) -> np.ndarray:
        """Returns the keys of [start, stop) in order; `to_keys` turns hidden states into keys of `width` dimensions."""
        keys = np.empty((stop - start, width), "<f2")
        for positions, hidden in self.hidden(stream, start, stop):
            keys[positions - start] = to_keys(hidden)
            progress(len(positions))
        return keys


def encoder_of(trained: TrainedModel, settings: MemorySettings, prepare: Callable[[], torch.device]) -> Encoder:
    """Returns a model that was trained here as an encoder; `prepare` sets up the device and returns it."""
    network, segment = trained.model_settings.network, trained.model_settings.training.segment_length
    return Encoder(
        digest=trained.digest,
        width=network.width,
        vocabulary=trained.facts["vocabulary"],
        reading=Reading.of(
            network.layers,
            segment=segment,
            memory=settings.carried,
            lanes=settings.lanes,
            stride=settings.stride_in(segment),
        ),
        load=lambda: trained.load(prepare()),
        device=prepare,
    )
