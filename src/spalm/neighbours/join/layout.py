"""The partitioned layout: vectors on disk in the order of their partitions, so that a partition is one read.

    keys          float16 or float32, as the vectors are given
    scan          bfloat16, in the scan space, relative to the partition's centre; uint32 of two numbers
    labels        int64: the entry's id, or the query's position
    documents     int64: the document of the entry or query
    half_norms    float32: |k|^2 / 2 of the vector in `scan`
    starts        int64: partition p is the rows from starts[p] to starts[p + 1]

All of it is scratch: made for one join, removed after it. It survives a killed process but is not synced to disk, so
after the machine itself went down it is made again from the beginning.
"""

import os
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.compute import ProgressCallback
from spalm.files import read_json, write_json
from spalm.neighbours.bfloat16 import from_pairs
from spalm.neighbours.join.assignment import AssignmentJob
from spalm.neighbours.kernels import distances_to_rows, distances_to_single_rows
from spalm.neighbours.parallel import ParallelMap, Workers, chunks
from spalm.neighbours.partitions import Partitions
from spalm.neighbours.scratch_files import allocate, boot_id, map_array, release, resident_file_bytes
from spalm.neighbours.vectors import Vectors, key_type

_TASK = 1 << 13
"""Rows that one thread moves, or converts, at a time."""
_FETCHED, _AROUND = 1 << 10, 64 << 10
"""Most rows that are fetched from anywhere at a time, and the bytes that the system may map for each."""
_LAYOUT = 2
"""Version of the layout: what a run of an earlier one has left unfinished is made again."""
_LOOKED_AFTER = 2 << 20
"""Bytes that are read before it is looked how many pages of mapped files are in RAM."""


class PartitionedVectors:
    """Vectors in the partitioned layout, opened for reading; about `room` bytes of the files are in RAM at a time."""

    def __init__(self, directory: Path, partitions: Partitions, width: int, *, dtype: str = "<f2", room: int = 1 << 30):
        self.partitions = partitions
        self._room, self._touched, self._before = room, 0, resident_file_bytes()
        self._fetched = max(16, min(_FETCHED, room // 8 // _AROUND))
        self.starts = np.fromfile(directory / "starts", "<i8")
        count = int(self.starts[-1])
        self.width = width
        pairs = -(-partitions.space.width // 2)
        self._key_bytes, self.scan_bytes = width * np.dtype(dtype).itemsize, 4 * pairs
        self._mapped = {
            "keys": map_array(directory / "keys", dtype, (count, width)),
            "labels": map_array(directory / "labels", "<i8", (count,)),
            "documents": map_array(directory / "documents", "<i8", (count,)),
            "half_norms": map_array(directory / "half_norms", "<f4", (count,)),
            "scan": map_array(directory / "scan", "<u4", (count, pairs)),
        }
        # Plain views: a slice of a np.memmap costs ten times that of an array.
        arrays = map(np.asarray, self._mapped.values())
        self.whole, self.label_of, self.document_of, self.half_norms, self.pairs = arrays

    def __len__(self) -> int:
        return len(self.whole)

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        """Returns the whole keys of consecutive rows."""
        self._touch(stop - start, self._key_bytes)
        return self.whole[start:stop]

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        """Returns the whole keys of any rows."""
        flat = np.ravel(rows)
        found = np.empty((len(flat), self.width), self.whole.dtype)
        for first, last in chunks(0, len(flat), self._fetched):
            self._touch(last - first, _AROUND)
            found[first:last] = self.whole[flat[first:last]]
        return found.reshape(*np.shape(rows), self.width)

    def squared_distances(
        self, vectors: Float[np.ndarray, "n width"], rows: Int[np.ndarray, "n count"]
    ) -> Float[np.ndarray, "n count"]:
        """Returns squared distances of vectors to the whole keys of their rows; infinite where a row is MISSING."""
        found = np.empty(rows.shape, np.float32)
        for first, last in chunks(0, len(rows), max(1, self._fetched // max(1, rows.shape[1]))):
            self._touch((last - first) * rows.shape[1], _AROUND)
            part = rows[first:last], vectors[first:last], found[first:last]
            if self.whole.dtype == np.float32:
                distances_to_single_rows(self.whole, *part)
            else:
                distances_to_rows(self.whole.view(np.uint16), *part)
        return found

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns entry ids, or positions of queries."""
        return self.label_of[start:stop]

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the document number of each row."""
        return self.document_of[start:stop]

    def partition_of(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the partition of each row."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def will_scan(self, rows: int) -> None:
        """Counts rows of `pairs` that are about to be read."""
        self._touch(rows, self.scan_bytes)

    def relative(self, rows: slice | np.ndarray) -> Float[Tensor, "rows width"]:
        """Returns rows in the scan space, relative to their partitions' centres and in single precision."""
        if isinstance(rows, slice):
            self.will_scan(rows.stop - rows.start)
        else:
            self._touch(len(rows), _AROUND)
        return from_pairs(self.pairs[rows], self.partitions.space.width)

    def scan(self, rows: Int[np.ndarray, "rows"]) -> Float[Tensor, "rows width"]:
        """Returns rows in the scan space, in single precision; they are as exact as bfloat16 is near the centres."""
        found = torch.empty(len(rows), self.partitions.space.width)
        centres, own = torch.from_numpy(self.partitions.centres), torch.from_numpy(self.partition_of(rows))
        for first, last in chunks(0, len(rows), self._fetched):  # of the whole, there is room for one copy only
            found[first:last] = self.relative(rows[first:last])
            found[first:last] += centres.index_select(0, own[first:last])
        return found

    def _touch(self, rows: int, row_bytes: int) -> None:
        """Counts the bytes that are read, and releases the mapped pages when they have become too many.

        The system maps more than is read: the pages around one, too. So it is asked how many there are.
        """
        self._touched += rows * row_bytes
        if self._touched > min(_LOOKED_AFTER, self._room):
            self._touched = 0
            if resident_file_bytes() - self._before > self._room:
                release(*self._mapped.values())


def partition_on_disk(
    vectors: Vectors,
    partitions: Partitions,
    directory: Path,
    *,
    block: int,
    workers: Workers,
    progress: ProgressCallback = lambda _: None,
) -> PartitionedVectors:
    """Makes the partitioned layout of `vectors` at `directory`, moving `block` rows at a time, and opens it.

    Every row counts as progress twice. Finding partitions is work for the engine; moving rows is not, because all of
    them go into the same files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state, folder = _MoveState(directory / "state.json"), directory / "unordered"
    if state.fresh:
        shutil.rmtree(folder, ignore_errors=True)
        state.save()
    progress(state.moved)
    if state.moved < len(vectors) or not len(vectors):
        job = AssignmentJob(vectors, partitions, folder)
        job.run(workers, progress)
        _RowMover(job, directory, block, parallel=workers.parallel).move(state, progress)
    else:
        progress(len(vectors))
    shutil.rmtree(folder, ignore_errors=True)
    return PartitionedVectors(directory, partitions, vectors.width, dtype=key_type(vectors))


class _MoveState:
    """The number of rows that the second pass has moved; `fresh` if there is no earlier work to rely on."""

    def __init__(self, path: Path):
        self._path = path
        found = read_json(path, dict, remedy="give --restart to begin again") if path.exists() else {}
        if (found.get("boot"), found.get("layout")) != (boot_id(), _LAYOUT):
            found = {}
        self.fresh, self.moved = not found, found.get("moved", 0)

    def save(self) -> None:
        """Writes the state to its file."""
        write_json(self._path, {"moved": self.moved, "boot": boot_id(), "layout": _LAYOUT})


class _RowMover:
    """The second pass of the partitioned layout: writes every row to its place."""

    def __init__(self, job: AssignmentJob, directory: Path, block: int, *, parallel: ParallelMap):
        self.job, self.vectors, self.partitions = job, job.vectors, job.partitions
        self.directory, self.block, self.parallel = directory, block, parallel

    def move(self, state: _MoveState, progress: ProgressCallback) -> None:
        """Writes partition after partition, the rows of each in their old order."""
        partitions = len(self.partitions)
        starts = np.concatenate([[0], np.cumsum(self.job.sizes(len(self.vectors)))])
        starts.astype("<i8").tofile(self.directory / "starts")
        places = starts[:-1] + self.job.sizes(state.moved)
        for start, stop in chunks(state.moved, len(self.vectors), self.block):
            rows = self.job.rows(start, stop)
            order = np.argsort(rows.partition, kind="stable")
            in_order = rows.partition[order]
            sizes = np.bincount(rows.partition, minlength=partitions)
            rank = np.arange(stop - start) - (np.cumsum(sizes) - sizes)[in_order]
            places, target = places + sizes, places[in_order] + rank
            self._write("keys", self.vectors.keys(start, stop), order, target=target)
            self._write("half_norms", rows.half_norms, order, target=target)
            self._write("labels", self.vectors.labels(start, stop), order, target=target)
            self._write("documents", self.vectors.documents(start, stop), order, target=target)
            self._write("scan", rows.scan, order, target=target)
            state.moved = stop
            state.save()
            progress(stop - start)

    def _write(self, name: str, source: np.ndarray, order: np.ndarray, *, target: np.ndarray) -> None:
        """Puts source[order] into the file `name` at the rows `target`, which rise.

        Runs of rows are written directly: a mapping would fault in every page of the file for every block.
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
            self.parallel(move, chunks(0, len(order), _TASK))
        finally:
            os.close(file)


def _write_all(file: int, rows: np.ndarray, offset: int) -> None:
    """Writes all bytes of `rows` at an offset, by as many system calls as that takes."""
    left = rows.data.cast("B")
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
