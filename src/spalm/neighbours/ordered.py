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
from collections.abc import Callable
from itertools import pairwise
from mmap import MADV_DONTNEED
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.artifact import write_json
from spalm.neighbours.kernels import squared_distances
from spalm.neighbours.partitions import Partitions
from spalm.neighbours.workers import Map, chunks

_TASK = 1 << 14
"""Rows that one thread projects and assigns, or moves, at a time."""
_UNORDERED = ("unordered.partition", "unordered.half_norms", "unordered.scan")

Progress = Callable[[int], None]


class Vectors(Protocol):
    """What can be put in order: the entries of a memory, or the queries of a split."""

    width: int

    def __len__(self) -> int: ...

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]: ...

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Ids of entries, or positions of queries."""

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """A number for the document of each row, the same for entries and queries; -1 where there is none."""


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
        """Between vectors and whole keys; infinite where a row is NOTHING."""
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
    progress: Progress = lambda _: None,
) -> Ordered:
    """The ordered copy of `vectors` at `directory`, made `block` rows at a time; `progress` is told of a row twice."""
    directory.mkdir(parents=True, exist_ok=True)
    state = _State(directory / "state.json")
    progress(state.assigned + state.moved)
    if state.moved < len(vectors) or not len(vectors):
        work = _Work(vectors, partitions, directory, block, in_parallel)
        work.assign(state, progress)
        work.move(state, progress)
    for name in _UNORDERED:
        (directory / name).unlink(missing_ok=True)
    return Ordered(directory, partitions, vectors.width)


class _State:
    """How many rows each pass has done."""

    def __init__(self, path: Path):
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("boot") != boot():
            found = {}
        self.assigned, self.moved = found.get("assigned", 0), found.get("moved", 0)

    def save(self) -> None:
        write_json(self._path, {"assigned": self.assigned, "moved": self.moved, "boot": boot()})


class _Work:
    """The two passes: find every row's partition, then write the rows to their places."""

    def __init__(self, vectors: Vectors, partitions: Partitions, directory: Path, block: int, in_parallel: Map):
        self.vectors, self.partitions, self.directory = vectors, partitions, directory
        self.block, self.in_parallel = block, in_parallel
        self.member = self._array("unordered.partition", "<i4")
        self.half_norms = self._array("unordered.half_norms", "<f4")
        reduced = partitions.space.reduced
        self.scan = self._array("unordered.scan", "<f2", partitions.space.width) if reduced else None

    def _array(self, name: str, dtype: str, width: int | None = None) -> np.ndarray:
        count = len(self.vectors)
        return mapped(self.directory / name, dtype, (count,) if width is None else (count, width), "r+")

    def assign(self, state: _State, progress: Progress) -> None:
        space = self.partitions.space
        for start, stop in chunks(state.assigned, len(self.vectors), self.block):

            def assign(task: tuple[int, int]) -> None:
                rows = slice(*task)
                vectors = space.project(self.vectors.keys(*task))
                if self.scan is not None:
                    rounded = vectors.half()
                    self.scan[rows] = rounded.numpy()
                    vectors = rounded.float()
                self.half_norms[rows] = vectors.square().sum(1).numpy() / 2
                self.member[rows] = self.partitions.assign(vectors.numpy())

            self.in_parallel(assign, chunks(start, stop, _TASK))
            release(self.member, self.half_norms, *([] if self.scan is None else [self.scan]))
            state.assigned = stop
            state.save()
            progress(stop - start)

    def move(self, state: _State, progress: Progress) -> None:
        """The partitions in order, within each the rows in order."""
        partitions = len(self.partitions)
        starts = np.concatenate([[0], np.cumsum(self._sizes(len(self.vectors)))])
        starts.astype("<i8").tofile(self.directory / "starts")
        places = starts[:-1] + self._sizes(state.moved)
        for start, stop in chunks(state.moved, len(self.vectors), self.block):
            member = np.asarray(self.member[start:stop])
            order = np.argsort(member, kind="stable")
            sizes = np.bincount(member, minlength=partitions)
            rank = np.arange(stop - start) - (np.cumsum(sizes) - sizes)[member[order]]
            places, target = places + sizes, places[member[order]] + rank
            self._write("keys", self.vectors.keys(start, stop), order, target)
            self._write("half_norms", self.half_norms[start:stop], order, target)
            self._write("labels", self.vectors.labels(start, stop), order, target)
            self._write("documents", self.vectors.documents(start, stop), order, target)
            if self.scan is not None:
                self._write("scan", self.scan[start:stop], order, target)
                release(self.scan)
            release(self.member, self.half_norms)
            state.moved = stop
            state.save()
            progress(stop - start)

    def _sizes(self, rows: int) -> Int[np.ndarray, "partitions"]:
        """How many of the first `rows` belong to each partition."""
        parts = [self.member[start:stop] for start, stop in chunks(0, rows, self.block)]
        return sum((np.bincount(part, minlength=len(self.partitions)) for part in parts), np.zeros(1, np.int64))

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
