"""The index of a memory that is larger than RAM: its lists stay on disk, and a query reads the few that are near it.

    lists     for each partition: the codes of its keys, then their ids
    index     the rest of faiss's index: where the list of each partition is

It is made in parts by the engine: each part of the keys is sorted into lists of its own, in a file; then the lists of
all parts are merged. A part whose file exists is not made again.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from mmap import MADV_RANDOM, MADV_WILLNEED
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float, Int

from spalm.compute import (
    Engine,
    JobPart,
    ProgressCallback,
    SentByFields,
    half_of_machine_ram,
    split_rows,
    unfinished_parts,
)
from spalm.compute.mapping import advise
from spalm.console import bar
from spalm.files import write_atomically
from spalm.neighbours.index.ivf import (
    FILE,
    PARTITIONS,
    TRAINED,
    FaissIndex,
    IvfIndex,
    empty_index,
    fill_index,
    refuse_unless_fitting,
    train_index,
)
from spalm.neighbours.partitions import Partitions
from spalm.neighbours.scratch_files import check_disk_space
from spalm.neighbours.vectors import Vectors

LISTS = "lists"
"""File of the lists."""
_PART, _MOST_PARTS = 1 << 18, 256
"""Keys of a part, and largest number of parts: all of their files are open while they are merged."""


class OnDiskIndex(FaissIndex):
    """An inverted-file index by faiss whose lists are a mapped file."""

    on_disk = True

    def __init__(self, index: IvfIndex, partitions: Partitions, folder: Path):
        super().__init__(index, partitions)
        self._folder = folder
        self._lists_file = _MappedLists(index.invlists)
        self._added = empty_index(index.quantizer, index.d)
        """Index in RAM of the entries that were added later: the lists on disk never change."""
        self._added.sq, self._added.is_trained = index.sq, True

    @classmethod
    def build(cls, entries: Vectors, seed: int, folder: Path, *, engine: Engine) -> "OnDiskIndex":
        """Sorts the entries into lists, part by part, and merges the parts."""
        partitions = train_index(entries, seed, folder, engine=engine)
        code = partitions.space.width + 8
        check_disk_space(folder, 2 * len(entries) * code, "the index")
        job = FillJob(entries, folder)
        rows = max(_PART, -(-len(entries) // _MOST_PARTS))
        everything = split_rows(0, len(entries), rows)
        left = unfinished_parts(everything, folder)
        at_once = max(1, min(engine.cores, half_of_machine_ram() // (4 * rows * code)))
        with bar("fill the index", len(entries), len(entries) - sum(map(len, left))) as shown:
            for _ in engine.run_parts(job, left, shown.advance, threads=1, per_machine=at_once):
                pass
        with bar("put its lists together", None):
            return cls(_merged([folder / part.file_name for part in everything], folder), partitions, folder)

    def add(self, ids: Int[np.ndarray, "n"], keys: Float[np.ndarray, "n width"]) -> bool:
        """Adds entries to the lists in RAM."""
        self._added.add_with_ids(self._projected(keys), np.ascontiguousarray(ids, np.int64))
        return True

    def delete(self, ids: Int[np.ndarray, "n"]) -> None:
        """Removes entries from the lists in RAM; those on disk never change."""
        self._added.remove_ids(np.ascontiguousarray(ids, np.int64))

    def candidates(self, queries: Float[np.ndarray, "n width"], count: int) -> Int[np.ndarray, "n some"]:
        """Returns the ids of the `count` nearest by their codes, from the lists on disk and from those in RAM."""
        vectors = self._projected(queries)
        distances, lists = self._centres.search(vectors, self.effort)
        self._lists_file.fetch(np.unique(lists[lists >= 0]))
        self._added.nprobe = self.effort
        found = [
            index.search_preassigned(vectors, count, lists, distances)[1]
            for index in (self._index, self._added)
            if index.ntotal
        ]
        return np.concatenate(found, 1)

    def save(self, folder: Path) -> None:
        """Moves the lists to a folder, and writes the rest of the index there."""
        (self._folder / LISTS).replace(folder / LISTS)
        self._folder = folder
        self._lists_file.rename(LISTS)  # without a folder: it is found beside the index
        super().save(folder)
        for name in (FILE, LISTS):
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> "OnDiskIndex":
        """Opens what `save` has written."""
        flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
        with _faiss_silenced():
            index: IvfIndex = faiss.read_index(str(folder / FILE), flags)
        partitions = Partitions.load(folder / PARTITIONS)
        refuse_unless_fitting(index, partitions)
        _refuse_unless_inside(index, folder / LISTS)
        return cls(index, partitions, folder)


def _refuse_unless_inside(index: IvfIndex, path: Path) -> None:
    """Raises an error if a list would lie outside of the file: reading it would be a crash."""
    lists: Any = faiss.downcast_InvertedLists(index.invlists)
    if not isinstance(lists, faiss.OnDiskInvertedLists) or Path(lists.filename).name != path.name:
        raise ValueError("the index has its lists elsewhere")
    places: Any = lists.lists
    size, row = path.stat().st_size, lists.code_size + 8
    if size != lists.totsize or lists.code_size != index.code_size or lists.nlist != index.nlist:
        raise ValueError(f"{path} is not as long as it was")
    for number in range(lists.nlist):
        held = places.at(number)
        if held.size > held.capacity or (held.capacity and held.offset + held.capacity * row > size):
            raise ValueError(f"{path}: list {number} is not inside of it")


class _MappedLists:
    """Lists in a mapped file, with advice to the system about what to read.

    Left to itself, the system reads megabytes around each page that is touched.
    """

    def __init__(self, lists: faiss.InvertedLists):
        self._lists: Any = faiss.downcast_InvertedLists(lists)
        self._lists.prefetch_nthread = 0
        advise(int(self._lists.ptr), self._lists.totsize, MADV_RANDOM)

    def rename(self, name: str) -> None:
        """Sets the file name that the index will look for when it is read."""
        self._lists.filename = name

    def fetch(self, numbers: Int[np.ndarray, "n"]) -> None:
        """Has the system read these lists, all at once."""
        for number in numbers.tolist():
            held = self._lists.lists.at(number)
            size = held.capacity * (self._lists.code_size + 8)
            advise(int(self._lists.ptr) + held.offset, size, MADV_WILLNEED)


@dataclass(frozen=True)
class FillJob(SentByFields):
    """The job of sorting keys into the lists of their partitions, a file for each part."""

    entries: Vectors
    """Entries of the memory."""
    folder: Path
    """Folder of the trained index and the partitions, to which the parts' files are written."""

    @cached_property
    def _partitions(self) -> Partitions:
        return Partitions.load(self.folder / PARTITIONS)

    def __call__(self, part: JobPart, progress: ProgressCallback) -> None:
        """Writes the lists of a part to its file."""
        index: IvfIndex = faiss.read_index(str(self.folder / TRAINED))
        fill_index(index, self._partitions, self.entries, part=part, progress=progress)
        content = faiss.VectorIOWriter()
        faiss.write_InvertedLists(index.invlists, content)
        write_atomically(self.folder / part.file_name, faiss.vector_to_array(content.data).tobytes(), shared=True)


def _merged(files: list[Path], folder: Path) -> IvfIndex:
    """Returns the trained index with the lists of all parts, on disk."""
    index: IvfIndex = faiss.read_index(str(folder / TRAINED))
    (folder / LISTS).unlink(missing_ok=True)
    # Mapped, not read: together they may be larger than RAM.
    opened = [faiss.read_InvertedLists(faiss.FileIOReader(str(path)), faiss.IO_FLAG_MMAP) for path in files]
    pointers = faiss.InvertedListsPtrVector()  # pyright: ignore[reportAttributeAccessIssue]
    for each in opened:
        pointers.push_back(each)
    lists: Any = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(folder / LISTS))
    with _faiss_silenced():
        index.ntotal = lists.merge_from_multiple(pointers.data(), len(opened))
    index.replace_invlists(lists, own=True)
    lists.this.disown()
    return index


@contextmanager
def _faiss_silenced() -> Iterator[None]:
    """Keeps what faiss prints about lists on disk out of our own output; faiss has no switch for it."""
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
