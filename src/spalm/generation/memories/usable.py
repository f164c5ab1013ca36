"""The contract of a memory that is open: what searching it and changing it need."""

from abc import ABC, abstractmethod
from functools import cached_property

from spalm.corpus import Tokeniser
from spalm.generation.passages.bm25 import Bm25Settings
from spalm.generation.passages.ranking import PassageIndex
from spalm.memory import Encoder, Memory
from spalm.semiparametric import Search


class UsableMemory(ABC):
    """A memory with its index, its paragraphs, and what makes keys of documents that are added."""

    memory: Memory
    """The memory on disk."""
    bm25 = Bm25Settings()
    """Settings of the ranking of passages; they are read when the first are asked for."""

    @property
    @abstractmethod
    def tokeniser(self) -> Tokeniser:
        """Turns text into tokens and back."""

    @property
    def has_keys(self) -> bool:
        """Whether the memory has keys, without which there are no nearest contexts."""
        return len(self.memory.entries().with_keys) > 0

    @cached_property
    @abstractmethod
    def search(self) -> Search:
        """Live search for nearest contexts."""

    @cached_property
    def passages(self) -> PassageIndex:
        """The paragraphs of the memory, to be ranked for a question."""
        return PassageIndex(self.memory, self.tokeniser, self.bm25)

    @property
    @abstractmethod
    def encoder_of_documents(self) -> Encoder | None:
        """Makes the keys of documents that are added; None: they get no keys."""
