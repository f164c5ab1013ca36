"""The queries of a split that is not in the memory: its keys, encoded now and kept in files."""

import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spalm.artifact import write_atomically
from spalm.compute import Engine, JobPart, ProgressCallback, SentByFields, split_rows, unfinished_parts
from spalm.console import bar
from spalm.corpus import TokenSplit
from spalm.memory import Encoder, Memory
from spalm.neighbours.kernels import MISSING

_ENCODED = 1 << 16
"""Queries of one file."""


@dataclass(frozen=True)
class Encoded:
    """Finished: what a join wants to know of vectors."""

    folder: Path
    count: int
    width: int
    size: int
    """Queries of a file."""

    def __len__(self) -> int:
        return self.count

    def keys(self, start: int, stop: int) -> np.ndarray:
        found = [np.zeros((0, self.width), "<f2")]
        while start < stop:
            number, row = divmod(start, self.size)
            rows = min(stop - start, self.size - row)
            path, numbers = self.folder / JobPart(number, 0, 0).file_name, rows * self.width
            found.append(np.fromfile(path, "<f2", numbers, offset=2 * self.width * row).reshape(rows, self.width))
            start += rows
        return np.concatenate(found)

    def labels(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)

    def documents(self, start: int, stop: int) -> np.ndarray:
        return np.full(stop - start, MISSING)


def encode(encoder: Encoder, memory: Memory, text: TokenSplit, folder: Path, engine: Engine) -> Encoded:
    """The keys of every position, in `folder`; files that are there are not made again."""
    folder.mkdir(exist_ok=True)
    stride = encoder.reading.stride
    size = stride * max(1, _ENCODED // stride)
    everything = split_rows(0, len(text), size)
    left = unfinished_parts(everything, folder)
    with bar(f"encode {text.split}", len(text), len(text) - sum(map(len, left))) as shown:
        for _ in engine.run_parts(
            _Encoding(encoder, memory, text, folder), left, shown.advance, threads=engine.threads
        ):
            pass
    return Encoded(folder, len(text), memory.width, size)


@dataclass(frozen=True)
class _Encoding(SentByFields):
    encoder: Encoder
    memory: Memory
    text: TokenSplit
    folder: Path

    @property
    def gpus(self) -> int:
        return self.encoder.gpus

    def __call__(self, part: JobPart, told: ProgressCallback) -> None:
        keys = self.encoder.keys(self.text, part.first, part.last, self.memory.keys_of, self.memory.width, told)
        write_atomically(self.folder / part.file_name, keys.tobytes(), mark=f".{secrets.token_hex(4)}")
