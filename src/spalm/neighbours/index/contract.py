"""Indexes for live queries: what a search library, or a vector database, must do to serve here.

An index only proposes candidates. It may propose too few, some twice, forgotten ones, and in any order: `search.py`
asks the memory which of them are alive and compares whole keys.
"""

import json
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Float, Int

from spalm.artifact import write_json
from spalm.compute import LOCAL, Engine
from spalm.console import bar
from spalm.errors import InputError
from spalm.memory import Entries
from spalm.neighbours.index.ivf import FILE, PARTITIONS, Faiss
from spalm.neighbours.index.on_disk import LISTS, OnDisk

Kind = Literal["exact", "faiss", "disk", "scann"]
FILES = (FILE, LISTS, PARTITIONS, "ids", "leaves.json")
"""What indexes of one kind or another leave in their folder."""


class Index(Protocol):
    effort: int
    """How thoroughly it looks: partitions, leaves. More of it finds more."""
    most_effort: int
    on_disk: bool
    """Whether it is for memories larger than RAM: then keys that it proposes are fetched all at once."""

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:
        """Takes entries in; False if it cannot, and they must be searched beside it."""

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        """Drops entries, if it can: they are not handed out again in any case."""

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        """Ids of about `count` near entries for each query, MISSING in place of missing ones."""

    def save(self, folder: Path) -> None: ...


def build_index(kind: Kind, entries: Entries, seed: int, folder: Path, engine: Engine = LOCAL) -> Index:
    """`folder`: for what is too large for memory, until it is saved; work that was begun there goes on."""
    if engine.separate_processes and kind != "disk":
        raise InputError(f"--kind {kind}: it is made here, in memory; leave out --engine, or give --kind disk")
    return _KINDS[kind].build(entries, seed, folder, engine)


def load_index(kind: Kind, folder: Path) -> Index:
    return _KINDS[kind].load(folder)


class Exact:
    """No index at all: it proposes nothing and takes nothing in, so every entry is searched beside it."""

    effort = most_effort = 1
    on_disk = False

    @classmethod
    def build(cls, entries: Entries, seed: int, folder: Path, engine: Engine) -> "Exact":  # noqa: ARG003
        return cls()

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:  # noqa: ARG002
        return False

    def delete(self, ids: Int[np.ndarray, "n"]) -> None: ...

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n 0"]:  # noqa: ARG002
        return np.zeros((len(queries), 0), np.int64)

    def save(self, folder: Path) -> None: ...

    @classmethod
    def load(cls, folder: Path) -> "Exact":  # noqa: ARG003
        return cls()


class Scann:
    """The paper's library: a tree of leaves, codes within them, re-ranked. It takes nothing in once it is built."""

    on_disk = False

    def __init__(self, searcher, ids: Int[np.ndarray, "n"], leaves: int):
        self._searcher, self._ids = searcher, ids
        self.effort, self.most_effort = 1, leaves

    @classmethod
    def build(cls, entries: Entries, seed: int, folder: Path, engine: Engine) -> "Scann":  # noqa: ARG003
        library = _scann()
        count = len(entries)
        leaves = max(1, min(round(2 * count**0.5), count // 16))
        with bar("build the index", None):
            keys = entries.keys(0, count).astype(np.float32)
            builder = library.builder(keys, 10, "squared_l2")
            builder = builder.tree(leaves, 1, training_sample_size=min(count, 250_000))
            searcher = builder.score_ah(2, anisotropic_quantization_threshold=float("nan")).reorder(100).build()
        return cls(searcher, entries.labels(0, count), leaves)

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:  # noqa: ARG002
        return False

    def delete(self, ids: Int[np.ndarray, "n"]) -> None: ...

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        rows, _ = self._searcher.search_batched_parallel(
            np.ascontiguousarray(queries, np.float32),
            final_num_neighbors=count,
            pre_reorder_num_neighbors=4 * count,
            leaves_to_search=self.effort,
        )
        return self._ids[rows.astype(np.int64)]

    def save(self, folder: Path) -> None:
        (folder / FILE).mkdir(exist_ok=True)
        self._searcher.serialize(str(folder / FILE), relative_path=True)
        self._ids.astype("<i8").tofile(folder / "ids")
        write_json(folder / "leaves.json", self.most_effort)

    @classmethod
    def load(cls, folder: Path) -> "Scann":
        leaves = json.loads((folder / "leaves.json").read_text())
        return cls(_scann().load_searcher(str(folder / FILE)), np.fromfile(folder / "ids", "<i8"), leaves)


def _scann():
    try:
        from scann.scann_ops.py import scann_ops_pybind
    except ImportError:
        raise InputError("the index kind scann needs its library: pip install 'spalm[scann]'") from None
    return scann_ops_pybind


_KINDS = {"exact": Exact, "faiss": Faiss, "disk": OnDisk, "scann": Scann}
