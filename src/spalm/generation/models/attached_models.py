"""The models of a pretrained base with a memory: the base alone, and with each combiner that was fitted."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from spalm.attachment import ALWAYS_SEARCH, Attached
from spalm.generation.memories import AddedMemory, open_added_memory
from spalm.generation.models.model_set import ModelSet, Neighbours, Network, Variant, no_neighbours
from spalm.memory import Encoder, source_of_split
from spalm.runs import HeldOut
from spalm.semiparametric import Search


class AttachedModels(ModelSet):
    """The models of an attached directory; the base model is loaded when it is first used."""

    def __init__(self, attached: Attached):
        self.attached = attached
        self.directory, self.title = attached.directory, attached.directory.resolve().name
        self.corpus, self.memory, self.default = attached.corpus, attached.memory, attached.settings.combiner
        self.chat_template_folder = attached.directory
        self.policy, self.threshold = None, ALWAYS_SEARCH
        if attached.has_keys and attached.settings.search < 1:
            self.policy, self.threshold = attached.policy, attached.combiner_artifact.facts["threshold"]

    @property
    def names(self) -> list[str]:
        return list(self.attached.combiners)

    def model_name(self, variant: str) -> str:  # noqa: ARG002
        return self.title

    @cached_property
    def device(self) -> torch.device:
        return self.attached.base.device

    @cached_property
    def encoder(self) -> Encoder:
        return self.attached.base.query_encoder

    @property
    def encoder_of_documents(self) -> Encoder | None:
        return self.encoder if self.attached.has_keys else None

    @cached_property
    def search(self) -> Search:
        return self.attached.search

    @cached_property
    def _network(self) -> Network:
        return Network("model", self.attached.base.generator, self.encoder.reading)

    def variant(self, name: str, split: HeldOut = "test", position: int = 0) -> Variant:  # noqa: ARG002
        return Variant(name, self._network, self.attached.combiners[name])

    def further_memory(self, folder: Path) -> AddedMemory:
        return open_added_memory(folder, self)

    def neighbours_of_split(self, split: HeldOut, rows: np.ndarray) -> Neighbours:
        """Returns neighbours from other documents. A position's own is excluded, as the memory holds dev and test."""
        if not self.has_keys:
            return no_neighbours(len(rows))
        memory, entries = self.memory, self.memory.entries().with_keys
        first = memory.first_id(source_of_split(self.corpus, split))
        if first is not None and (entries.rows(first + rows) >= 0).all():
            return self.search.find(entries.take(entries.rows(first + rows)), own=first + rows)
        text = self.corpus.split(split)  # forgotten since: read again; the search cannot find it
        keys = self.encoder.keys(text, int(rows[0]), int(rows[-1]) + 1, to_keys=memory.keys_of, width=memory.width)
        return self.search.find(keys)
