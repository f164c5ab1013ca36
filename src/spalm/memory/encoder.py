"""The frozen model whose hidden states are keys, and how it reads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import Field

from spalm.compute import SentByFields
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.lm import LanguageModel, Reading, TrainedModel, hidden_states
from spalm.lm.reading import Hidden
from spalm.settings import Settings


class MemorySettings(Settings):
    stride: int | None = Field(default=None, gt=0)
    """New tokens in each window of one segment; the rest of the window is left context. Default: half a segment."""
    carried: int = Field(default=0, ge=0)
    """Instead of overlapping windows: length of the short-term memory that is carried from segment to segment."""
    key_width: int | None = Field(default=None, gt=0)
    """Reduce keys to this many dimensions, by a projection learned from them; default: keep them whole."""
    lanes: int = Field(default=16, gt=0)
    """Places of the text read side by side. It changes the speed, not the keys."""

    def stride_in(self, segment: int) -> int:
        """New tokens of a window of `segment`."""
        stride = self.stride or -(-segment // 2)
        if stride > segment:
            raise InputError(f"memory.stride = {stride}: windows have {segment} tokens; give at most that")
        return stride


@dataclass(frozen=True)
class Encoder(SentByFields):
    """Reads text and gives a hidden state for each position."""

    digest: str
    width: int
    vocabulary: int
    reading: Reading
    load: Callable[[], LanguageModel]
    device: Callable[[], torch.device]
    entries_per_shard: int | None = None
    """For models so slow that what they made should be safe on disk sooner than the memory asks for."""

    @cached_property
    def model(self) -> LanguageModel:
        return self.load()

    @property
    def gpus(self) -> int:
        """That it computes on."""
        return int(self.device().type == "cuda")

    @property
    def identity(self) -> dict[str, Any]:
        """Keys made by encoders with the same identity may be compared with each other."""
        reading = {"segment": self.reading.segment, "memory": self.reading.memory, "stride": self.reading.stride}
        if self.reading.by_document:
            reading["by_document"] = True
        return {
            "encoder": {"digest": self.digest, "width": self.width, "vocabulary": self.vocabulary},
            "reading": reading,
        }

    def hidden(self, stream: TokenStream, start: int, stop: int) -> Iterator[Hidden]:
        """(positions, hidden states) of [start, stop) in any order; `start` lies on the grid of strides."""
        return hidden_states(self.model, stream, self.reading, range(start, stop))

    def keys(
        self,
        stream: TokenStream,
        start: int,
        stop: int,
        to_keys: Callable[[torch.Tensor], np.ndarray],
        width: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> np.ndarray:
        """The keys of [start, stop), in order."""
        keys = np.empty((stop - start, width), "<f2")
        for positions, hidden in self.hidden(stream, start, stop):
            keys[positions - start] = to_keys(hidden)
            progress(len(positions))
        return keys


def encoder_of(trained: TrainedModel, settings: MemorySettings, prepare: Callable[[], torch.device]) -> Encoder:
    """A model of ours as an encoder."""
    network, segment = trained.model_settings.network, trained.model_settings.training.segment_length
    return Encoder(
        digest=trained.digest,
        width=network.width,
        vocabulary=trained.facts["vocabulary"],
        reading=Reading.of(network.layers, segment, settings.carried, settings.lanes, settings.stride_in(segment)),
        load=lambda: trained.load(prepare()),
        device=prepare,
    )
