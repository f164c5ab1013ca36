"""Copies of a model with its memory, whose documents may be changed."""

import shutil
from pathlib import Path

from spalm.compute import Execution
from spalm.generation import Model, load_model
from spalm.memory import Memory
from spalm.neighbours import IndexKind, IndexSettings, make_searcher

_REMADE = ("index", "SHA256SUMS")
"""What is not copied: the index is made anew, and the digests are those of files that will change."""


def copy_folder(source: Path, directory: Path, *, without: tuple[str, ...] = ()) -> None:
    """Copies the folder of a model with its memory, without its index and what else is named."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.name in (*_REMADE, *without):
            continue
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, directory / path.name)


def copied(source: Path, directory: Path, kind: IndexKind, *, execution: Execution) -> Model:
    """Returns a copy of a model with its memory, with an index of some kind made anew."""
    copy_folder(source, directory)
    make_searcher(Memory(directory / "memory"), directory / "index", IndexSettings(kind=kind))
    return load_model(directory, execution.hardware)
