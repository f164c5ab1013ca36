"""Vectors on disk in the order of their partitions, so that a partition is one read.

    keys          float16, as they are in the memory
    scan          float16, in the space of the partitions; only where that has fewer dimensions
    labels        int64: the entry's id, or the query's position
    documents     int64: the entry's document, or the query's
    half_norms    float32: |k|^2 / 2 in the space of the partitions
    starts        int64: partition p is the rows from starts[p] to starts[p + 1]

All of it is scratch: made for one join, removed after it. It survives a killed process but is not synced to disk, so
what a machine left behind when it went down is begun again.
"""

import json
import os
import shutil
from itertools import pairwise
from mmap import MADV_DONTNEED
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.artifact import write_json
from spalm.compute import LOCAL, Engine, ProgressCallback
from spalm.neighbours.join.assignment import Unordered
from spalm.neighbours.kernels import squared_distances
from spalm.neighbours.partitions import Partitions
from spalm.neighbours.vectors import Vectors
from spalm.neighbours.workers import Map, chunks

_TASK = 1 << 14
"""Rows that one thread moves at a time."""


def mapped(path: Path, dtype: str, shape: tuple[int, ...], mode: str = "c") -> np.ndarray:
    """An array in a file: to be read (torch wants it writable, so a change would stay private), or with r+ written."""
    if not all(shape):
        path.touch()
        return np.zeros(shape, dtype)
    if mode == "r+" and not path.exists():
        allocate(path, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, mode, shape=shape)


def allocate(path: Path, size: int) -> None:
    """A file with room on the disk for all of it: a full disk is an error now, not a crash while it is written."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)


def release(*arrays: np.ndarray) -> None:
    """Gives the pages of mapped files back, so that what was touched does not count as memory of this process."""
    for array in arrays:
        if isinstance(array, np.memmap):
            array._mmap.madvise(MADV_DONTNEED)


class Ordered:
    """A finished ordered copy, opened for reading; about `room` bytes of it are in memory at a time."""

    def __init__(self, directory: Path, partitions: Partitions, width: int, room: int = 1 << 30):
        self.partitions = partitions
        self._room, self._touched = room, 0
        self.starts = np.fromfile(directory / "starts", "<i8")
        count = int(self.starts[-1])
        self.width = width
        reduced = partitions.space.reduced
        self._mapped = {
            "keys": mapped(directory / "keys", "<f2", (count, width)),
            "labels": mapped(directory / "labels", "<i8", (count,)),
            "documents": mapped(directory / "documents", "<i8", (count,)),
            "half_norms": mapped(directory / "half_norms", "<f4", (count,)),
            "scan": mapped(directory / "scan", "<f2", (count, partitions.space.width)) if reduced else np.zeros(0),
        }
        # Plain views: a slice of a np.memmap costs ten times that of an array.
        self.whole, self.label_of, self.document_of, half_norms, self._scan = map(np.asarray, self._mapped.values())
        self.half_norms = torch.from_numpy(half_norms)

    def __len__(self) -> int:
        return len(self.whole)

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        self._touch(stop - start, 2 * self.width)
        return self.whole[start:stop]

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        self._touch(np.size(rows), 2 * self.width)
        return self.whole[rows]

    def squared_distances(
        self, vectors: Float[np.ndarray, "n width"], rows: Int[np.ndarray, "n count"]
    ) -> Float[np.ndarray, "n count"]:
        """Between vectors and whole keys; infinite where a row is MISSING."""
        self._touch(np.size(rows), 2 * self.width)
        found = np.empty(rows.shape, np.float32)
        squared_distances(self.whole.view(np.uint16), rows, vectors, found)
        return found

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        return self.label_of[start:stop]

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        return self.document_of[start:stop]

    def partition_of(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        return np.searchsorted(self.starts, rows, side="right") - 1

    def scan(self, rows: slice | np.ndarray) -> Float[Tensor, "rows width"]:
        """Rows in the space of the partitions."""
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        self._touch(count, 2 * self.partitions.space.width)
        if not self.partitions.space.reduced:
            return self.partitions.space.project(self.whole[rows])
        return torch.from_numpy(self._scan[rows]).float()

    def _touch(self, rows: int, row_bytes: int) -> None:
        """Keeps count of what is read, and gives it back when it may have become too much."""
        self._touched += rows * row_bytes
        if self._touched > self._room:
            release(*self._mapped.values())
            self._touched = 0


def put_in_order(
    vectors: Vectors,
    partitions: Partitions,
    directory: Path,
    block: int,
    in_parallel: Map,
    progress: ProgressCallback = lambda _: None,
    engine: Engine = LOCAL,
    at_once: int = 1,
) -> Ordered:
    """The ordered copy of `vectors` at `directory`, made `block` rows at a time; `progress` is told of a row twice.

    Finding partitions is work for the engine; moving rows is not, because all of them go into the same files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state, folder = _State(directory / "state.json"), directory / "unordered"
    if state.anew:
        shutil.rmtree(folder, ignore_errors=True)
        state.save()
    progress(state.moved)
    if state.moved < len(vectors) or not len(vectors):
        unordered = Unordered(vectors, partitions, folder)
        unordered.assign(engine, at_once, progress)
        _Work(unordered, directory, block, in_parallel).move(state, progress)
    else:
        progress(len(vectors))
    shutil.rmtree(folder, ignore_errors=True)
    return Ordered(directory, partitions, vectors.width)


class _State:
    """How many rows the second pass has moved; `anew` where there is nothing that can be relied on."""

    def __init__(self, path: Path):
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("boot") != boot():
            found = {}
        self.anew, self.moved = not found, found.get("moved", 0)

    def save(self) -> None:
        write_json(self._path, {"moved": self.moved, "boot": boot()})


class _Work:
    """The second pass: writes the rows to their places."""

    def __init__(self, unordered: Unordered, directory: Path, block: int, in_parallel: Map):
        self.unordered, self.vectors, self.partitions = unordered, unordered.vectors, unordered.partitions
        self.directory, self.block, self.in_parallel = directory, block, in_parallel

    def move(self, state: _State, progress: ProgressCallback) -> None:
        """The partitions in order, within each the rows in order."""
        partitions = len(self.partitions)
        starts = np.concatenate([[0], np.cumsum(self.unordered.sizes(len(self.vectors)))])
        starts.astype("<i8").tofile(self.directory / "starts")
        places = starts[:-1] + self.unordered.sizes(state.moved)
        for start, stop in chunks(state.moved, len(self.vectors), self.block):
            rows = self.unordered.rows(start, stop)
            member = rows.member
            order = np.argsort(member, kind="stable")
            sizes = np.bincount(member, minlength=partitions)
            rank = np.arange(stop - start) - (np.cumsum(sizes) - sizes)[member[order]]
            places, target = places + sizes, places[member[order]] + rank
            self._write("keys", self.vectors.keys(start, stop), order, target)
            self._write("half_norms", rows.half_norms, order, target)
            self._write("labels", self.vectors.labels(start, stop), order, target)
            self._write("documents", self.vectors.documents(start, stop), order, target)
            if self.partitions.space.reduced:
                self._write("scan", rows.scan, order, target)
            state.moved = stop
            state.save()
            progress(stop - start)

    def _write(self, name: str, source: np.ndarray, order: np.ndarray, target: np.ndarray) -> None:
        """Puts source[order] into the file `name` at the rows `target`, which rise.

        By writes of runs of rows, not through a mapping: that would fault in every page of the file for every block.
        """
        row_bytes = source.dtype.itemsize * int(np.prod(source.shape[1:], dtype=np.int64))
        path = self.directory / name
        if not path.exists():
            allocate(path, row_bytes * len(self.vectors))
        file = os.open(path, os.O_WRONLY)

        def move(task: tuple[int, int]) -> None:
            rows = np.ascontiguousarray(source[order[slice(*task)]])
            places = target[slice(*task)]
            borders = np.concatenate([[0], np.flatnonzero(np.diff(places) != 1) + 1, [len(places)]])
            for first, last in pairwise(borders.tolist()):
                _write_all(file, rows[first:last], int(places[first]) * row_bytes)

        try:
            self.in_parallel(move, chunks(0, len(order), _TASK))
        finally:
            os.close(file)


def _write_all(file: int, rows: np.ndarray, offset: int) -> None:
    left = memoryview(rows).cast("B")
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def boot() -> str:
    """Changes when the machine starts anew; the same for ever where the system does not tell."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
