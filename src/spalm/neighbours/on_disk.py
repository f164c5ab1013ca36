"""The index of a memory that is larger than RAM: its lists stay on disk, and a query reads the few that are near it.

    lists                     of each partition: the codes of its keys, a byte for each dimension, then their ids
    index                     faiss: the centres of the partitions, and where the list of each is
    partitions.safetensors    the space in which keys are compared, and the two levels by which they were assigned

It is made in parts: each part of the keys is sorted into lists of its own, in a file, by whatever engine there is; then
the lists of all parts are put together. A part that is there is not made again.
"""

import ctypes
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import faiss
import numpy as np
from faiss.contrib.ivf_tools import add_preassigned
from jaxtyping import Float, Int

from spalm.artifact import TEMPORARY
from spalm.console import bar
from spalm.engine import Engine, Part, Told, Travelling, parts
from spalm.neighbours.budget import half_of_the_machine, refuse_unless_it_fits
from spalm.neighbours.partitions import Partitions, partition, partition_size
from spalm.neighbours.vectors import Vectors, sample
from spalm.neighbours.workers import chunks, workers

FILE = "index"
LISTS = "lists"
PARTITIONS = "partitions.safetensors"
_TRAINED = "trained"
_PART, _MOST_PARTS = 1 << 18, 256
"""Keys of a part, unless that makes too many parts: all of them are open when they are put together."""
_AT_ONCE = 1 << 14
_NEIGHBOURS = 4
"""Of the usual query: by them, partitions get their size."""
_POINTS = 1 << 16
"""Sampled keys by which codes get their range."""
_WIDER = 3
"""In a space of fewer dimensions, so many times as many are proposed: whole keys will tell."""
_READERS = 8
"""Threads that read lists ahead of the search."""


class OnDisk:
    def __init__(self, index: faiss.IndexIVF, partitions: Partitions, folder: Path):
        self._index, self._partitions, self._folder = index, partitions, folder
        faiss.downcast_InvertedLists(index.invlists).prefetch_nthread = _READERS
        self._added = _empty(index.quantizer, index.d)
        self._added.sq, self._added.is_trained = index.sq, True
        self.most_effort = index.nlist

    @property
    def effort(self) -> int:
        return self._index.nprobe

    @effort.setter
    def effort(self, partitions: int) -> None:
        self._index.nprobe = self._added.nprobe = partitions

    @classmethod
    def build(cls, entries: Vectors, seed: int, folder: Path, engine: Engine) -> "OnDisk":
        count = max(1, len(entries) // partition_size(len(entries), _NEIGHBOURS))
        partitions = _learned(entries, count, seed, folder, engine)
        refuse_unless_it_fits(folder, 2 * len(entries) * (partitions.space.width + 8), "the index")
        filling = Filling(entries, folder)
        rows = max(_PART, -(-len(entries) // _MOST_PARTS))
        everything = parts(0, len(entries), rows)
        left = [part for part in everything if not filling.file(part).exists()]
        at_once = max(1, min(engine.cores, half_of_the_machine() // (4 * rows * (partitions.space.width + 8))))
        with bar("fill the index", len(entries), len(entries) - sum(map(len, left))) as shown:
            for _ in engine.each(filling, left, shown.advance, at_once, 1):
                pass
        with bar("put its lists together", None):
            return cls(_merged([filling.file(part) for part in everything], folder), partitions, folder)

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:
        """What was remembered since is kept in RAM, beside the lists."""
        vectors = self._partitions.space.project(keys).numpy()
        self._added.add_with_ids(vectors, np.ascontiguousarray(ids, np.int64))
        return True

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        """The lists on disk never change."""
        self._added.remove_ids(np.ascontiguousarray(ids, np.int64))

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        space = self._partitions.space
        vectors, wanted = space.project(queries).numpy(), count * (_WIDER if space.reduced else 1)
        found = [index.search(vectors, wanted)[1] for index in (self._index, self._added) if index.ntotal]
        return np.concatenate(found, 1)

    def save(self, folder: Path) -> None:
        """Moves the lists there from where they were made."""
        (self._folder / LISTS).replace(folder / LISTS)
        self._partitions.save(folder / PARTITIONS)
        faiss.write_index(self._index, str(folder / FILE))
        for name in (FILE, LISTS):
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
        self._folder = folder

    @classmethod
    def load(cls, folder: Path) -> "OnDisk":
        flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
        with _unheard():
            index = faiss.read_index(str(folder / FILE), flags)
        if (folder / LISTS).stat().st_size != faiss.downcast_InvertedLists(index.invlists).totsize:
            raise ValueError(f"{folder / LISTS} is not as long as it was")  # to read beyond its end would be a crash
        return cls(index, Partitions.load(folder / PARTITIONS), folder)


@dataclass(frozen=True)
class Filling(Travelling):
    """The job of sorting keys into lists, a file for each part."""

    entries: Vectors
    folder: Path

    @cached_property
    def _partitions(self) -> Partitions:
        return Partitions.load(self.folder / PARTITIONS)

    def __call__(self, part: Part, told: Told) -> None:
        index = faiss.read_index(str(self.folder / _TRAINED))
        for first, last in chunks(part.first, part.last, _AT_ONCE):
            vectors = self._partitions.space.project(self.entries.keys(first, last)).numpy()
            member = self._partitions.assign(vectors).astype(np.int64)
            ids = np.ascontiguousarray(self.entries.labels(first, last), np.int64)  # named: the next line keeps none
            add_preassigned(index, vectors, member, ids)
            told(last - first)
        path = self.file(part)
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
        faiss.write_InvertedLists(index.invlists, faiss.FileIOWriter(str(unfinished)))
        unfinished.replace(path)

    def file(self, part: Part) -> Path:
        return self.folder / f"{part.number:08d}"


def _empty(quantizer: faiss.Index, width: int) -> faiss.IndexIVFScalarQuantizer:
    kind, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_L2
    return faiss.IndexIVFScalarQuantizer(quantizer, width, quantizer.ntotal, kind, metric)


def _learned(entries: Vectors, count: int, seed: int, folder: Path, engine: Engine) -> Partitions:
    """The partitions, and an index with nothing in it yet; both are left in `folder`."""
    path, trained = folder / PARTITIONS, folder / _TRAINED
    if not path.exists():
        most = half_of_the_machine() // 2
        with workers(engine.cores) as in_parallel:
            partition(entries, count, seed, lambda width: most // (4 * width), in_parallel).save(path)
    partitions = Partitions.load(path)
    if not trained.exists():
        centres = faiss.IndexFlatL2(partitions.space.width)
        centres.add(partitions.centres)
        index = _empty(centres, partitions.space.width)
        index.train(sample(entries, _POINTS, [seed, 2], partitions.space.project))
        unfinished = trained.with_name(trained.name + TEMPORARY)
        faiss.write_index(index, str(unfinished))
        unfinished.replace(trained)
    return partitions


def _merged(files: list[Path], folder: Path) -> faiss.IndexIVF:
    """The trained index with the lists of all parts, on disk."""
    index = faiss.read_index(str(folder / _TRAINED))
    (folder / LISTS).unlink(missing_ok=True)
    # Mapped, not read: together they may be larger than RAM.
    opened = [faiss.read_InvertedLists(faiss.FileIOReader(str(path)), faiss.IO_FLAG_MMAP) for path in files]
    pointers = faiss.InvertedListsPtrVector()
    for each in opened:
        pointers.push_back(each)
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(folder / LISTS))
    with _unheard():
        index.ntotal = lists.merge_from_multiple(pointers.data(), len(opened), False)
    index.replace_invlists(lists, True)
    lists.this.disown()
    return index


@contextmanager
def _unheard() -> Iterator[None]:
    """What faiss prints about lists on disk does not get among our own output; there is no switch for it."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
