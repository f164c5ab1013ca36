"""Memories of one tiny model: the same documents in one memory, or divided among several."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import spalm
from spalm.generation import Model
from spalm.memory import Memory
from spalm.neighbours import IndexSettings, make_searcher
from spalm.semiparametric import Knn, KnnCombiner, PlainCombiner
from support.servers import copied, with_combiner

CPU = spalm.Execution(spalm.Hardware("cpu", 1))
NORTH = "zz9 qq8 zz7 qq6 zz9 .\n\nmi7 nu9 zz3 lo24 zz9 .\n"
SOUTH = "zz9 qq8 xx7 yy9 lo3 .\n\nxx1 yy2 xx3 yy4 xx1 .\n"
TEXTS = {"north": {"map.md": NORTH, "note.md": "nu5 zz1 zz2 .\n" * 3}, "south": {"map.md": SOUTH}}
"""Texts by memory and document; a name occurs in both."""


@dataclass(frozen=True)
class MemoryFoldersOfTests:
    """Folders of what `attach` made, whose memories hold parts of the same documents."""

    own: Path
    """The documents that were attached."""
    north: Path
    south: Path
    whole: Path
    """Everything."""

    @property
    def further(self) -> dict[str, Path]:
        return {"north": self.north, "south": self.south}


def write_memories(attached: Path, folder: Path) -> MemoryFoldersOfTests:
    """Writes the folders, with indexes that search exactly."""
    made = MemoryFoldersOfTests(*(folder / name for name in ("own", "north", "south", "whole")))
    for path in (made.own, made.north, made.south, made.whole):
        copied(attached, path)
        shutil.rmtree(path / "index", ignore_errors=True)
    for name, path in made.further.items():
        memory = Memory(path / "memory")
        memory.forget(sorted(set(memory.entries().live_documents.names)))
        memory.compact()
        add_texts(path, name)
    for number, name in enumerate(TEXTS):
        add_texts(made.whole, name, prefix=f"{number} ")
    for path in (made.own, made.north, made.south, made.whole):
        make_searcher(Memory(path / "memory"), path / "index", IndexSettings(kind="exact"))
    return made


def add_texts(folder: Path, name: str, prefix: str = "") -> None:
    """Adds the texts of a memory to that in a folder."""
    model = spalm.load(folder, execution=CPU)
    for document, text in TEXTS[name].items():
        model.memory.add(prefix + document, text)


def trusting(model: Model) -> Model:
    """Goes by the nearest: what a mixture learns on a random model is not to trust anything."""
    return with_combiner(model, KnnCombiner(PlainCombiner(), Knn(0.95, 0.5, 4)))
