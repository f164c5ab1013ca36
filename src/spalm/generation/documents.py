"""The documents of a memory in use: listing, adding and forgetting them. The next search takes changes into account."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spalm.compute import Execution
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.generation.memories import UsableMemory
from spalm.memory import Memory, remember, source_of_text

_LAG = 1 << 13
"""Number of changed entries by which the index may lag behind. New ones are searched exactly until it takes them in."""


class UnknownDocument(InputError):
    """The memory holds no document of that name."""


class DocumentExists(InputError):
    """The memory holds a document of that name already."""


@dataclass(frozen=True)
class MemoryDocument:
    """A document of the memory."""

    name: str
    entries: int
    """Number of its entries, one for each token."""


class DocumentService:
    """Changes a memory and keeps its index up to date. No search may run during a change, but see `add`."""

    def __init__(self, memory: UsableMemory):
        self._memory = memory
        self._changed = 0
        self._index_follows: bool | None = None

    @property
    def store(self) -> Memory:
        """The memory on disk."""
        return self._memory.memory

    def __len__(self) -> int:
        return len(self.store.entries())

    def documents(self) -> list[MemoryDocument]:
        """Returns the documents, oldest first."""
        held = self.store.entries().live_documents
        return [MemoryDocument(name, int(count)) for name, count in zip(held.names, held.entries)]

    def add(self, name: str, text: str, *, check: Callable[[], None] = lambda: None) -> int:
        """Adds a document and returns the number of its entries.

        `check` is called after every window that is read, and may raise to stop. It may search the memory, in the same
        thread: nothing of the document can be found until all of it is written.
        """
        content, _ = text.encode(), name.encode()  # refuses invalid Unicode before anything is written
        if name in self.store.entries().live_documents.names:
            raise DocumentExists(
                f"the memory holds a document {name!r} already; delete that first, or give another name"
            )
        tokeniser = self._memory.tokeniser
        tokens = tokeniser.encode([content])[0]
        if not len(tokens):
            raise InputError("text: there is nothing in it to remember")
        self._prepare()
        stream = TokenStream(tokens, np.array([len(tokens)]), lambda: [name], start=tokeniser.start)
        # A batch that a crash left half written was never acknowledged, so it is thrown away.
        execution = Execution(restart=True)
        encoder = self._memory.encoder_of_documents
        remember(self.store, encoder, stream, source=source_of_text(stream), execution=execution, check=check)
        self._follow(len(tokens))
        return len(tokens)

    def forget(self, name: str) -> int:
        """Forgets the documents of a name and returns how many there were."""
        entries = sum(document.entries for document in self.documents() if document.name == name)
        if not entries:
            raise UnknownDocument(f"the memory holds no document {name!r}")
        self._prepare()
        count = self.store.forget([name])
        self._follow(entries)
        return count

    def _prepare(self) -> None:
        """Brings the index up to date before the first change, and finds out whether it can take in changes."""
        if not self._memory.has_keys:
            self._index_follows = False
        elif self._index_follows is None:
            self._index_follows = self._memory.search.searcher.catch_up()

    def _follow(self, changed: int) -> None:
        """Counts changed entries, and has the index take them in once there are many."""
        self._changed += changed
        if self._index_follows and self._changed > _LAG:
            self._memory.search.searcher.catch_up()
            self._changed = 0
