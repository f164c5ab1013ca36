"""A directory with a memory: the memory itself, or a run or an attached model around it, and what is in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spalm.artifact import MANIFEST, Artifact
from spalm.corpus import Corpus
from spalm.corpus.tokens import CORPUS_KIND
from spalm.files import holds_stage
from spalm.generation.trace import MEMORY_FOLDER, folder_around
from spalm.memory import Memory, is_memory
from spalm.memory.memory import IDENTITY


@dataclass(frozen=True)
class Removed:
    """Something that was removed."""

    path: Path
    what: str


@dataclass(frozen=True)
class Place:
    """A directory with a memory: the memory itself, or a run or an attached model around it."""

    root: Path
    memory: Memory

    @property
    def is_whole(self) -> bool:
        """Whether there is more than the memory itself."""
        return self.root.resolve() != self.memory.directory.resolve()

    @classmethod
    def of(cls, directory: Path) -> "Place":
        """Returns the place of a folder, which may be that of the memory within it."""
        around = folder_around(directory)
        inside = (around or directory) / MEMORY_FOLDER
        memory = Memory(inside if is_memory(inside) else directory)
        return cls(around or memory.directory, memory)

    def folders(self) -> list[Path]:
        """Returns the directory and all folders in it, each once.

        Of the links to folders, those to whole stages are followed: they are used as if the stages were there.
        """
        found: dict[Path, Path] = {}
        waiting = [self.root]
        while waiting:
            folder = waiting.pop()
            if folder.resolve() not in found:
                found[folder.resolve()] = folder
                inner = [path for path in folder.iterdir() if path.is_dir()]
                waiting += sorted((path for path in inner if not path.is_symlink() or holds_stage(path)), reverse=True)
        return [*found.values()]

    def files(self) -> list[Path]:
        """Returns the files of all folders."""
        return [path for folder in self.folders() for path in sorted(folder.iterdir()) if path.is_file()]

    def stages(self, file: str) -> list[Path]:
        """Returns the folders outside of the memory that hold a file of this name."""
        own = self.memory.directory.resolve()
        inside = [folder for folder in self.folders() if not folder.resolve().is_relative_to(own)]
        return [folder for folder in inside if (folder / file).is_file()]

    def artifacts(self, kind: str) -> Iterator[Artifact]:
        """Yields the finished artifacts of a kind anywhere in the directory."""
        for folder in self.stages(MANIFEST):
            found = Artifact(folder)
            if found.kind == kind:
                yield found

    def corpora(self) -> list[Corpus]:
        """Returns the finished corpora, those that were set aside among them; none for a memory alone."""
        return [Corpus(found.directory) for found in self.artifacts(CORPUS_KIND)] if self.is_whole else []

    def other_memories(self) -> list[Memory]:
        """Returns other memories in the directory, such as one that was set aside."""
        return [Memory(folder) for folder in self.stages(IDENTITY)]
