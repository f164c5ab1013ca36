"""The queries of a split that is not in the memory: its keys, encoded and kept in files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from spalm.compute import Engine, JobPart, ProgressCallback, SentByFields, split_rows, unfinished_parts
from spalm.console import bar
from spalm.corpus import TokenSplit
from spalm.files import write_atomically
from spalm.memory import MISSING, Encoder, Memory

_PART = 1 << 16
"""Queries of one file."""


@dataclass(frozen=True)
class EncodedQueries:
    """The keys of every position of a split, in files, with the interface `Vectors`."""

    folder: Path
    """Folder of the files."""
    count: int
    """Number of queries."""
    width: int
    """Dimensions of a key."""
    size: int
    """Queries of one file."""

    def __len__(self) -> int:
        return self.count

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        """Returns the keys of consecutive positions."""
        found = [np.zeros((0, self.width), "<f2")]
        while start < stop:
            number, row = divmod(start, self.size)
            rows = min(stop - start, self.size - row)
            path, numbers = self.folder / JobPart(number, 0, 0).file_name, rows * self.width
            found.append(np.fromfile(path, "<f2", numbers, offset=2 * self.width * row).reshape(rows, self.width))
            start += rows
        return np.concatenate(found)

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        """Returns the keys of any positions, read one by one."""
        found = [np.zeros((0, self.width), "<f2"), *(self.keys(row, row + 1) for row in rows.ravel().tolist())]
        return np.concatenate(found).reshape(*rows.shape, self.width)

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns the positions themselves."""
        return np.arange(start, stop)

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        """Returns MISSING: the queries are in no document of the memory."""
        return np.full(stop - start, MISSING)


def encode_queries(
    encoder: Encoder, memory: Memory, text: TokenSplit, *, folder: Path, engine: Engine
) -> EncodedQueries:
    """Makes the keys of every position of a split in `folder`; files that exist are not made again."""
    folder.mkdir(exist_ok=True)
    stride = encoder.reading.stride
    size = stride * max(1, _PART // stride)
    everything = split_rows(0, len(text), size)
    left = unfinished_parts(everything, folder)
    with bar(f"encode {text.split}", len(text), len(text) - sum(map(len, left))) as shown:
        for _ in engine.run_parts(
            _EncodingJob(encoder, memory, text, folder), left, shown.advance, threads=engine.threads
        ):
            pass
    return EncodedQueries(folder, len(text), memory.width, size)


@dataclass(frozen=True)
class _EncodingJob(SentByFields):
    """The job of making the keys of a split, a file for each part."""

    encoder: Encoder
    memory: Memory
    text: TokenSplit
    folder: Path

    @property
    def gpus(self) -> int:
        return self.encoder.gpus

    def __call__(self, part: JobPart, progress: ProgressCallback) -> None:
        keys = self.encoder.keys(
            self.text, part.first, part.last, to_keys=self.memory.keys_of, width=self.memory.width, progress=progress
        )
        write_atomically(self.folder / part.file_name, keys.tobytes(), shared=True)
