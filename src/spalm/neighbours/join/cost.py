"""What a bulk join may use and will cost: memory, disk, time."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from spalm.compute import Engine, half_of_machine_ram
from spalm.errors import InputError

_LEAST_RAM = 512 << 20
_MOST_QUERIES = 250_000
"""Queries of a block: more of them share a visit to a partition, fewer are lost by a kill."""
GFLOPS = 97.0
"""Of the core on which the constants below were measured, in the products of `gflops_of_a_core`."""
_MICROSECONDS, _MICROSECONDS_PER_DIMENSION = 22.0, 0.018
"""Time of one core for a query and its part of the preparations, at a million keys and a recall of 0.95."""
_PRODUCTS = 0.5
"""The part of it that faster products shorten."""
GROWTH = 0.15
"""How much more than proportionally to the keys the work grows."""


@dataclass(frozen=True)
class Budget:
    """RAM for the part of the join that one machine does, shared by its workers."""

    ram: int
    workers: int
    processes: bool = False
    """Whether workers are processes: then each maps files for itself, and has its own libraries besides."""

    @classmethod
    def of(cls, ram: int | None, engine: Engine) -> "Budget":
        """By default, half of this machine's memory, and as many of a machine's cores as that is enough for."""
        ram = half_of_machine_ram() if ram is None else ram
        workers = (
            engine.cores if engine.requested_threads == engine.cores else max(1, min(engine.cores, ram // _LEAST_RAM))
        )
        return cls(ram, workers, engine.separate_processes)

    def __post_init__(self) -> None:
        least = _LEAST_RAM * self.workers
        if self.ram < least:
            raise InputError(
                f"--ram {self.ram >> 20}M is too little for {self.workers} worker(s); give at least {least >> 20}M, "
                "or fewer --threads"
            )

    @property
    def _usable(self) -> int:
        """What is left beside the libraries themselves."""
        return self.ram - (448 << 20)

    @property
    def room(self) -> int:
        """Bytes of mapped keys that a process has in memory at a time."""
        return max(64 << 20, self._usable // 3 // (self.workers if self.processes else 1))

    def queries(self, scan_width: int, kept: int, visits: float) -> int:
        """Queries that a thread answers at a time: their vectors, best rows and visits, of all threads, take half."""
        each = 4 * scan_width + 32 * kept + 64 * visits + 512
        return max(1000, min(_MOST_QUERIES, int(self._usable / 2 / self.workers / each)))

    def rows(self, width: int) -> int:
        """Rows that are put in order at a time: held as float16. The more, the longer the runs that are written."""
        return max(4096, min(1 << 21, self._usable // 8 // (2 * width + 64)))

    def points(self, scan_width: int) -> int:
        """Sampled keys from which partitions are learned."""
        return max(1 << 16, self.ram // 4 // (4 * scan_width))


@dataclass(frozen=True)
class Estimate:
    seconds: float
    disk: int

    @classmethod
    def of(cls, keys: int, own: int, others: int, width: int, table: int, recall: float, workers: int) -> "Estimate":
        """Of `own` keys that ask themselves and `others` that are copied too; `table`: bytes of the result."""
        slower = 1 - _PRODUCTS + _PRODUCTS * GFLOPS / gflops_of_a_core()
        seconds = core_seconds(keys, own + others, width, recall) * slower / workers
        # Whole keys and half as much for the scan, twice while they are ordered; labels, documents, norms, partitions.
        return cls(seconds, (keys + others) * (4 * width + 32) + table)


def core_seconds(keys: float, queries: float, width: int, recall: float) -> float:
    """Time of the core on which the constants were measured."""
    work = (_MICROSECONDS + _MICROSECONDS_PER_DIMENSION * width) * 1e-6 * (max(keys, 1) / 1e6) ** GROWTH
    thorough = (0.05 / max(1 - recall, 1e-3)) ** 0.6
    return queries * work * thorough


def refuse_unless_it_fits(directory: Path, disk: int, what: str) -> None:
    """Complains unless `directory` can come to hold so many bytes, those that it holds now included."""
    already = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    free = shutil.disk_usage(directory).free
    if disk > free + already:
        raise InputError(
            f"{directory} has {free / 1e9:.1f} GB free, {what} needs up to {disk / 1e9:.1f} GB; "
            "make room or choose another --out"
        )


def gflops_of_a_core() -> float:
    """Single-precision products of the size that the join uses, right now."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    queries, keys = torch.randn(512, 128), torch.randn(256, 128)
    queries @ keys.T
    began = time.perf_counter()
    for _ in range(100):
        queries @ keys.T
    torch.set_num_threads(threads)
    return 100 * 2 * 512 * 256 * 128 / (time.perf_counter() - began) / 1e9


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
