"""The index that faiss keeps in RAM: a list of codes for each partition of the keys; a query scans the nearest lists.

    index                     faiss: the centres of the partitions, and their lists
    partitions.safetensors    the scan space in which keys are compared, and the two levels by which they were assigned

Keys are compared in the scan space with a byte for each dimension: candidates need not be in their right order.
"""

from math import ceil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from faiss.contrib.ivf_tools import add_preassigned
from jaxtyping import Float, Int

from spalm.compute import Engine, JobPart, ProgressCallback, half_of_machine_ram
from spalm.console import bar
from spalm.files import write_atomically
from spalm.neighbours.parallel import chunks, thread_map
from spalm.neighbours.partitions import Partitions, learn_partitions, partition_size
from spalm.neighbours.vectors import Vectors, sample_vectors

IvfIndex = Any
"""A faiss.IndexIVFScalarQuantizer: faiss's stubs know only the base classes of what its functions return."""
FILE = "index"
"""File, or for ScaNN folder, of the index itself."""
PARTITIONS = "partitions.safetensors"
"""File of the partitions."""
TRAINED = "trained"
"""File of the trained index without entries, while the index is made."""
_AT_ONCE = 1 << 14
"""Keys that are added at a time."""
_NEIGHBOURS = 4
"""Neighbours of the usual query, for which the size of partitions is chosen."""
GROUPS, _AROUND = 16, 4
"""Groups whose centres are compared with a query: at least GROUPS, and _AROUND times as many as its partitions fill."""
_POINTS = 1 << 16
"""Sampled keys from which the range of the codes is learned."""


class FaissIndex:
    """An inverted-file index in RAM, by faiss."""

    on_disk = False

    def __init__(self, index: IvfIndex, partitions: Partitions):
        self._index, self._partitions = index, partitions
        self._centres: Any = faiss.downcast_index(index.quantizer)
        self.most_effort = index.nlist

    @property
    def key_width(self) -> int:
        """Number of dimensions of the keys that the index is for."""
        return len(self._partitions.space.mean)

    @property
    def effort(self) -> int:
        """Number of lists that a query scans."""
        return self._index.nprobe

    @effort.setter
    def effort(self, partitions: int) -> None:
        self._index.nprobe = partitions
        share = _AROUND * partitions / self.most_effort
        self._centres.nprobe = min(self._centres.nlist, max(GROUPS, ceil(share * self._centres.nlist)))

    @classmethod
    def build(cls, entries: Vectors, seed: int, folder: Path, *, engine: Engine) -> "FaissIndex":
        """Trains the index and adds all entries."""
        partitions = train_index(entries, seed, folder, engine=engine)
        index: IvfIndex = faiss.read_index(str(folder / TRAINED))
        with bar("fill the index", len(entries)) as shown:
            fill_index(index, partitions, entries, part=JobPart(0, 0, len(entries)), progress=shown.advance)
        return cls(index, partitions)

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:
        """Adds entries to the lists."""
        self._index.add_with_ids(self._projected(keys), np.ascontiguousarray(ids, np.int64))
        return True

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        """Removes entries from the lists."""
        self._index.remove_ids(np.ascontiguousarray(ids, np.int64))

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        """Returns the ids of the `count` nearest by their codes."""
        return self._index.search(self._projected(queries), count)[1]

    def _projected(self, keys: Float[np.ndarray, "n width"]) -> Float[np.ndarray, "n reduced"]:
        """Returns keys in the scan space."""
        return self._partitions.space.project(keys).numpy()

    def save(self, folder: Path) -> None:
        """Writes the index to a folder."""
        self._partitions.save(folder / PARTITIONS)
        faiss.write_index(self._index, str(folder / FILE))

    @classmethod
    def load(cls, folder: Path) -> "FaissIndex":
        """Reads what `save` has written."""
        index: IvfIndex = faiss.read_index(str(folder / FILE))
        partitions = Partitions.load(folder / PARTITIONS)
        refuse_unless_fitting(index, partitions)
        return cls(index, partitions)


def refuse_unless_fitting(index: IvfIndex, partitions: Partitions) -> None:
    """Raises an error unless what was read is an index of these partitions, as we make it."""
    centres = faiss.downcast_index(index.quantizer) if isinstance(index, faiss.IndexIVFScalarQuantizer) else None
    if not isinstance(centres, faiss.IndexIVFFlat):
        raise ValueError("this is another kind of index")
    width = partitions.space.width
    if not (index.d == centres.d == width and index.nlist == centres.ntotal == len(partitions.centres)):
        raise ValueError("the index and its partitions do not fit each other")


def empty_index(quantizer: faiss.Index, width: int) -> IvfIndex:
    """Returns an untrained index over the quantizer's centres, with a byte for each dimension."""
    kind, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_L2
    return faiss.IndexIVFScalarQuantizer(quantizer, width, quantizer.ntotal, kind, metric)


def _centres_of(partitions: Partitions) -> faiss.IndexIVFFlat:
    """Returns an index of the centres themselves, by groups: a query is not compared with all of them."""
    groups: Any = faiss.IndexFlatL2(partitions.space.width)
    groups.add(partitions.groups)
    centres = faiss.IndexIVFFlat(groups, partitions.space.width, len(partitions.groups))
    centres.train(partitions.centres)
    add_preassigned(centres, partitions.centres, partitions.group_of_each)
    centres.make_direct_map()
    centres.own_fields = True
    groups.this.disown()
    return centres


def train_index(entries: Vectors, seed: int, folder: Path, *, engine: Engine) -> Partitions:
    """Learns the partitions and trains an index without entries; leaves both in `folder` and returns the partitions."""
    path, trained = folder / PARTITIONS, folder / TRAINED
    if not path.exists():
        count, most = max(1, len(entries) // partition_size(len(entries), _NEIGHBOURS)), half_of_machine_ram() // 2
        with thread_map(engine.requested_threads) as parallel:
            learn_partitions(
                entries, count, seed, most_points=lambda width: most // (4 * width), parallel=parallel
            ).save(path)
    partitions = Partitions.load(path)
    if not trained.exists():
        index = empty_index(_centres_of(partitions), partitions.space.width)
        index.train(sample_vectors(entries, _POINTS, [seed, 2], transform=partitions.space.project))
        write_atomically(trained, faiss.serialize_index(index).tobytes())
    return partitions


def fill_index(
    index: IvfIndex, partitions: Partitions, entries: Vectors, *, part: JobPart, progress: ProgressCallback
) -> None:
    """Adds the rows of a part to the lists of their partitions."""
    for first, last in chunks(part.first, part.last, _AT_ONCE):
        vectors = partitions.space.project(entries.keys(first, last)).numpy()
        member = partitions.assign(vectors).astype(np.int64)
        ids = np.ascontiguousarray(entries.labels(first, last), np.int64)  # a variable: faiss does not keep it alive
        add_preassigned(index, vectors, member, ids)
        progress(last - first)
