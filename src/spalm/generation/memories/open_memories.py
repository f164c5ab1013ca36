"""All memories that are open beside a model, by name: the one of its directory, and further ones."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from spalm.errors import InputError
from spalm.generation.memories.selection import MemorySelection
from spalm.generation.memories.usable import UsableMemory
from spalm.paths import user_path

MemoryFolders = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
"""Folders of memories, each perhaps given as NAME=FOLDER; or folders by name; or one folder."""
_LONGEST_NAME = 200
"""Highest number of characters of a memory's name."""
_MOST = 1 << 10
"""Highest number of memories that are open beside one model."""
_SELECTIONS = 16
"""Number of selections whose joined entries are kept."""


class UnknownMemory(InputError):
    """No memory of that name is open."""


class OpenMemories:
    """The memories that are open beside a model; the first is that of the model's own directory."""

    def __init__(self, own: str, memory: UsableMemory):
        self.own = own
        """Name of the memory in the model's own directory."""
        self._memories: dict[str, UsableMemory] = {own: memory}
        self._selected = lru_cache(_SELECTIONS)(self._make_selection)

    def __getitem__(self, name: str) -> UsableMemory:
        self._refuse_unknown([name])
        return self._memories[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the memories, in the order in which they were opened."""
        return tuple(self._memories)

    def add(self, name: str, memory: UsableMemory) -> None:
        """Adds a memory under a name that no other has."""
        place = memory.memory.directory
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise InputError(f"{place}: {name!r} cannot be the name of a memory; give another as NAME=FOLDER")
        if name in self._memories:
            raise InputError(f"{place}: a memory {name!r} is open already; give this one another name as NAME=FOLDER")
        if any(each.memory.directory.samefile(place) for each in self._memories.values()):
            raise InputError(f"{place} is open already; give it once")
        if len(self._memories) == _MOST:
            raise InputError(f"{place}: {_MOST:,} memories are open, which is the most")
        self._memories[name] = memory

    def select(self, names: Iterable[str] | None = None) -> MemorySelection:
        """Returns the memories of some names, or of one, None: all; refuses names that no memory has."""
        if names is None:
            return self._selected(self.names)
        wanted = {names} if isinstance(names, str) else set(names)
        self._refuse_unknown(wanted)
        return self._selected(tuple(name for name in self._memories if name in wanted))

    def _make_selection(self, names: tuple[str, ...]) -> MemorySelection:
        numbered = enumerate(self._memories.items())
        return MemorySelection([(number, name, memory) for number, (name, memory) in numbered if name in names])

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._memories:
                raise UnknownMemory(f"there is no memory {name[:100]!r}; open are {', '.join(map(repr, self.names))}")


def named_folders(given: MemoryFolders) -> list[tuple[str | None, Path]]:
    """Returns the folders of memories with the names that are given to them, None: that of the folder."""
    if isinstance(given, Mapping):
        return [(name, user_path(folder)) for name, folder in given.items()]
    found = []
    for each in [given] if isinstance(given, str | Path) else given:
        name, equals, folder = str(each).partition("=")
        whole = user_path(each)
        named = equals and "/" not in name and not whole.exists()
        found.append((name, user_path(folder)) if named else (None, whole))
    return found
