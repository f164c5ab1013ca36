"""The kinds of index by name: exact (no index), faiss (in RAM), disk, scann."""

from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from spalm.choices import IndexKind
from spalm.compute import LOCAL, Engine
from spalm.errors import InputError
from spalm.neighbours.index.contract import Index
from spalm.neighbours.index.ivf import FILE, PARTITIONS, FaissIndex
from spalm.neighbours.index.on_disk import LISTS, OnDiskIndex
from spalm.neighbours.index.scann_index import IDS, LEAVES, ScannIndex
from spalm.neighbours.vectors import Vectors

FILES = (FILE, LISTS, PARTITIONS, IDS, LEAVES)
"""Files that indexes of one kind or another leave in their folder."""


class FlatIndex:
    """No index at all: it proposes nothing and nothing can be added, so the searcher compares every entry."""

    effort = most_effort = 1
    on_disk = False

    @classmethod
    def build(cls, entries: Vectors, seed: int, folder: Path, *, engine: Engine) -> "FlatIndex":  # noqa: ARG003
        """Returns an index of nothing."""
        return cls()

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:  # noqa: ARG002
        """Returns False: nothing can be added."""
        return False

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        """Does nothing."""

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n 0"]:  # noqa: ARG002
        """Returns no candidates."""
        return np.zeros((len(queries), 0), np.int64)

    def save(self, folder: Path) -> None:
        """Writes nothing."""

    @classmethod
    def load(cls, folder: Path) -> "FlatIndex":  # noqa: ARG003
        """Returns an index of nothing."""
        return cls()


_KINDS = {"exact": FlatIndex, "faiss": FaissIndex, "disk": OnDiskIndex, "scann": ScannIndex}
"""Class of each kind of index."""


def build_index(kind: IndexKind, entries: Vectors, seed: int, *, folder: Path, engine: Engine = LOCAL) -> Index:
    """Builds an index of all entries.

    Until the index is saved, `folder` holds what is too large for RAM; unfinished work in it is continued.
    """
    if engine.separate_processes and kind != "disk":
        raise InputError(f"--kind {kind}: it is made here, in memory; leave out --engine, or give --kind disk")
    return _KINDS[kind].build(entries, seed, folder, engine=engine)


def load_index(kind: IndexKind, folder: Path) -> Index:
    """Reads an index of this kind from the folder to which it was saved."""
    return _KINDS[kind].load(folder)
