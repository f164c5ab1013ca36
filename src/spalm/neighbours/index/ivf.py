"""The index that faiss keeps in RAM: of each partition of the keys a list of codes; a query scans the nearest lists.

    index                     faiss: the centres of the partitions, and their lists
    partitions.safetensors    the space in which keys are compared, and the two levels by which they were assigned

Keys are compared in the space of their principal axes, with a byte for each dimension: candidates need not be in their
right order.
"""

from math import ceil
from pathlib import Path

import faiss
import numpy as np
from faiss.contrib.ivf_tools import add_preassigned
from jaxtyping import Float, Int

from spalm.artifact import write_atomically
from spalm.compute import Engine, JobPart, ProgressCallback, half_of_machine_ram
from spalm.console import bar
from spalm.neighbours.partitions import Partitions, partition, partition_size
from spalm.neighbours.vectors import Vectors, sample
from spalm.neighbours.workers import chunks, workers

FILE = "index"
PARTITIONS = "partitions.safetensors"
TRAINED = "trained"
_AT_ONCE = 1 << 14
_NEIGHBOURS = 4
"""Of the usual query: by them, partitions get their size."""
GROUPS, _AROUND = 16, 4
"""Groups among whose partitions the nearest of a query are looked for: at least so many, and so many times as many as
those partitions would fill."""
_POINTS = 1 << 16
"""Sampled keys by which codes get their range."""


class Faiss:
    on_disk = False

    def __init__(self, index: faiss.IndexIVF, partitions: Partitions):
        self._index, self._partitions = index, partitions
        self._centres = faiss.downcast_index(index.quantizer)
        self.most_effort = index.nlist

    @property
    def effort(self) -> int:
        return self._index.nprobe

    @effort.setter
    def effort(self, partitions: int) -> None:
        self._index.nprobe = partitions
        share = _AROUND * partitions / self.most_effort
        self._centres.nprobe = min(self._centres.nlist, max(GROUPS, ceil(share * self._centres.nlist)))

    @classmethod
    def build(cls, entries: Vectors, seed: int, folder: Path, engine: Engine) -> "Faiss":
        partitions = learn(entries, seed, folder, engine)
        index = faiss.read_index(str(folder / TRAINED))
        with bar("fill the index", len(entries)) as shown:
            fill(index, partitions, entries, JobPart(0, 0, len(entries)), shown.advance)
        return cls(index, partitions)

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:
        self._index.add_with_ids(self._projected(keys), np.ascontiguousarray(ids, np.int64))
        return True

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        self._index.remove_ids(np.ascontiguousarray(ids, np.int64))

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        return self._index.search(self._projected(queries), count)[1]

    def _projected(self, keys: Float[np.ndarray, "n width"]) -> Float[np.ndarray, "n reduced"]:
        return self._partitions.space.project(keys).numpy()

    def save(self, folder: Path) -> None:
        self._partitions.save(folder / PARTITIONS)
        faiss.write_index(self._index, str(folder / FILE))

    @classmethod
    def load(cls, folder: Path) -> "Faiss":
        return cls(faiss.read_index(str(folder / FILE)), Partitions.load(folder / PARTITIONS))


def empty_index(quantizer: faiss.Index, width: int) -> faiss.IndexIVFScalarQuantizer:
    kind, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_L2
    return faiss.IndexIVFScalarQuantizer(quantizer, width, quantizer.ntotal, kind, metric)


def _centres_of(partitions: Partitions) -> faiss.IndexIVFFlat:
    """An index of the centres themselves, by groups: a query is not compared with all of them."""
    groups = faiss.IndexFlatL2(partitions.space.width)
    groups.add(partitions.groups)
    centres = faiss.IndexIVFFlat(groups, partitions.space.width, len(partitions.groups))
    centres.train(partitions.centres)
    add_preassigned(centres, partitions.centres, partitions.group_of_each)
    centres.make_direct_map()
    centres.own_fields = True
    groups.this.disown()
    return centres


def learn(entries: Vectors, seed: int, folder: Path, engine: Engine) -> Partitions:
    """The partitions; in `folder` they are left, and beside them an index with nothing in it yet."""
    path, trained = folder / PARTITIONS, folder / TRAINED
    if not path.exists():
        count, most = max(1, len(entries) // partition_size(len(entries), _NEIGHBOURS)), half_of_machine_ram() // 2
        with workers(engine.requested_threads) as in_parallel:
            partition(entries, count, seed, lambda width: most // (4 * width), in_parallel).save(path)
    partitions = Partitions.load(path)
    if not trained.exists():
        index = empty_index(_centres_of(partitions), partitions.space.width)
        index.train(sample(entries, _POINTS, [seed, 2], partitions.space.project))
        write_atomically(trained, faiss.serialize_index(index).tobytes())
    return partitions


def fill(
    index: faiss.IndexIVF, partitions: Partitions, entries: Vectors, part: JobPart, told: ProgressCallback
) -> None:
    """Puts the rows of a part into their lists."""
    for first, last in chunks(part.first, part.last, _AT_ONCE):
        vectors = partitions.space.project(entries.keys(first, last)).numpy()
        member = partitions.assign(vectors).astype(np.int64)
        ids = np.ascontiguousarray(entries.labels(first, last), np.int64)  # named: the next line does not hold it
        add_preassigned(index, vectors, member, ids)
        told(last - first)
