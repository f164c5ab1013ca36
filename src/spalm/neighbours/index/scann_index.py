"""The index of ScaNN, the paper's library: a tree whose leaves hold codes; the best candidates are re-ranked."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from spalm.compute import Engine
from spalm.console import bar
from spalm.digests import read_sums, refuse_changed, sum_up
from spalm.errors import InputError
from spalm.files import read_json, refuse_links_out_of, write_json
from spalm.neighbours.index.ivf import FILE
from spalm.neighbours.vectors import Vectors

IDS, LEAVES = "ids", "leaves.json"
"""Files beside ScaNN's own folder: the ids of its rows, and the number of leaves."""


class ScannIndex:
    """An index by ScaNN. Nothing can be added once it is built."""

    on_disk = False

    def __init__(self, searcher: Any, ids: Int[np.ndarray, "n"], leaves: int):
        self._searcher, self._ids = searcher, ids
        self.effort, self.most_effort = 1, leaves

    @classmethod
    def build(cls, entries: Vectors, seed: int, folder: Path, *, engine: Engine) -> "ScannIndex":  # noqa: ARG003
        """Builds the index in RAM."""
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
        """Returns False: nothing can be added."""
        return False

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        """Does nothing: ScaNN keeps every entry."""

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        """Returns the ids of the `count` nearest by their codes, re-ranked."""
        rows, _ = self._searcher.search_batched_parallel(
            np.ascontiguousarray(queries, np.float32),
            final_num_neighbors=count,
            pre_reorder_num_neighbors=4 * count,
            leaves_to_search=self.effort,
        )
        return self._ids[rows.astype(np.int64)]

    def save(self, folder: Path) -> None:
        """Writes the index to a folder."""
        (folder / FILE).mkdir(exist_ok=True)
        self._searcher.serialize(str(folder / FILE), relative_path=True)
        sum_up(folder / FILE, [path.name for path in (folder / FILE).iterdir()])
        self._ids.astype("<i8").tofile(folder / IDS)
        write_json(folder / LEAVES, self.most_effort)

    @classmethod
    def load(cls, folder: Path) -> "ScannIndex":
        """Reads what `save` has written."""
        leaves = read_json(folder / LEAVES, int)
        refuse_links_out_of(folder / FILE)
        refuse_changed(folder / FILE, read_sums(folder / FILE) or {}, "make the index again with `spalm index`")
        return cls(_scann().load_searcher(str(folder / FILE)), np.fromfile(folder / IDS, "<i8"), leaves)


def _scann() -> Any:
    """Imports ScaNN; raises an error if it is not installed."""
    try:
        from scann.scann_ops.py import scann_ops_pybind  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("the index kind scann needs its library: pip install 'spalm[scann]'") from None
    return scann_ops_pybind
