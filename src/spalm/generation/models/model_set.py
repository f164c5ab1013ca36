"""The models that one directory holds. They share the text, the memory and its index; each is opened once."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from spalm.attachment import ALWAYS_SEARCH, SearchPolicy
from spalm.corpus import Corpus, Tokeniser, TokenStream
from spalm.errors import InputError
from spalm.generation.memories import MemoryFolders, OpenMemories, UsableMemory, named_folders
from spalm.lm import LanguageModel, Reading
from spalm.memory import Encoder, Memory
from spalm.runs import HeldOut
from spalm.semiparametric import Combiner, PlainCombiner, Search

Neighbours = tuple[np.ndarray, np.ndarray]
"""Ids of entries and their squared distances, nearest first, a row for each position."""


def no_neighbours(rows: int) -> Neighbours:
    """Returns no neighbours at all for each of `rows` positions."""
    return np.zeros((rows, 0), np.int64), np.zeros((rows, 0), np.float32)


@dataclass(frozen=True)
class Network:
    """A network, and how it reads. Variants that share one read a passage once."""

    name: str
    model: LanguageModel
    reading: Reading


@dataclass(frozen=True)
class Variant:
    """One of the models of a directory: a network, and the way the memory is combined with it."""

    name: str
    network: Network
    combiner: Combiner

    @property
    def has_memory(self) -> bool:
        """Whether the variant uses the long-term memory at all."""
        return not isinstance(self.combiner, PlainCombiner)


class ModelSet(UsableMemory):
    """Everything that is opened at a directory: networks, memory, index, and the variants made of them."""

    directory: Path
    title: str
    """Name shown to people."""
    corpus: Corpus
    memory: Memory
    default: str
    """Name of the variant that is used unless another is named."""
    chat_template_folder: Path | None = None
    """Folder of a tokeniser that may have a chat template."""
    policy: SearchPolicy | None = None
    """Decides which positions are searched; None: all."""
    threshold: float = ALWAYS_SEARCH
    """Expected gain above which a position is searched."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of the variants."""

    @abstractmethod
    def variant(self, name: str, split: HeldOut = "test", position: int = 0) -> Variant:
        """Returns a variant for a passage that begins at a position of a split.

        A mixture that learned from a part of dev is not used on that part.
        """

    @abstractmethod
    def model_name(self, variant: str) -> str:
        """Returns the name by which clients ask for a variant."""

    @cached_property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which the networks compute."""

    @cached_property
    @abstractmethod
    def encoder(self) -> Encoder:
        """Computes keys of texts: of queries, and of documents that are to be remembered."""

    @property
    def encoder_of_documents(self) -> Encoder | None:
        """Makes the keys of documents that are added to the memory; None: they get no keys."""
        return self.encoder

    @cached_property
    @abstractmethod
    def search(self) -> Search:
        """Live search of the memory."""

    @abstractmethod
    def neighbours_of_split(self, split: HeldOut, rows: np.ndarray) -> Neighbours:
        """Returns the neighbours of positions of dev or test, without anything of their own documents."""

    def neighbours_of_text(self, stream: TokenStream) -> Neighbours:
        """Returns the neighbours of every position of a text; none at all where the memory has no keys."""
        if not self.has_keys:
            return no_neighbours(len(stream))
        keys = self.encoder.keys(stream, 0, len(stream), to_keys=self.memory.keys_of, width=self.memory.width)
        return self.search.find(keys)

    @cached_property
    def memories(self) -> OpenMemories:
        """The memories that are open beside the networks: that of the directory, and further ones."""
        return OpenMemories(self.directory.resolve().name, self)

    def open_memories(self, folders: MemoryFolders) -> None:
        """Opens further memories of the same base model; see `MemoryFolders`."""
        for name, folder in named_folders(folders):
            self.memories.add(folder.resolve().name if name is None else name, self.further_memory(folder))

    def further_memory(self, folder: Path) -> UsableMemory:
        """Opens a further memory, which is refused unless its keys and tokens are those of this model."""
        raise InputError(f"{folder}: {self.directory} is a run, which has one memory; give what `spalm attach` made")

    @property
    def tokeniser(self) -> Tokeniser:
        """The tokeniser that all variants share."""
        return self.corpus.tokeniser

    def variants(self, split: HeldOut = "test", position: int = 0) -> list[Variant]:
        """Returns all variants for a passage that begins at a position of a split."""
        return [self.variant(name, split, position) for name in self.names]

    def known(self, name: str | None) -> str:
        """Returns the name of a variant, the default one for None; refuses unknown names."""
        if name is not None and name not in self.names:
            raise InputError(f"--model {name}: {self.directory} has {', '.join(reversed(self.names))}")
        return name or self.default
