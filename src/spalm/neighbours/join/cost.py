"""The RAM that a bulk join may use, and estimates of the time and the disk space that it will need."""

import time
from dataclasses import dataclass

import torch

from spalm.compute import Engine, half_of_machine_ram
from spalm.errors import InputError
from spalm.neighbours.bfloat16 import HAS_BFLOAT16

_LIBRARIES, _THREAD = 512 << 20, 256 << 20
"""Bytes of RAM that the libraries take, with pages of the given vectors, and that each thread needs at least."""
_PROCESS = 512 << 20
"""Bytes of RAM that each worker needs at least where workers are processes."""
_MOST_QUERIES = 250_000
"""Largest number of queries in a block: more of them share a visit to a partition, but more are lost by a kill."""
GFLOPS = 97.0
"""Speed of the core on which the constants below were measured, in the products of `gflops_of_a_core`."""
_MICROSECONDS, _MICROSECONDS_PER_DIMENSION = 22.0, 0.018
"""Time of one core for a query and its share of the preparations, at a million keys and a recall of 0.95."""
_PRODUCTS = 0.5
"""Share of a query's time that gets shorter with faster matrix products."""
_NEIGHBOURS, _MORE_NEIGHBOURS = 4, 0.25
"""Number of neighbours with which the constants were measured, and the exponent by which the work grows with more."""
_BFLOAT16 = 2.6
"""Speed of the join's products in bfloat16, with all that is done with the scores, in `gflops_of_a_core`."""
_SECONDS_OF_A_QUERY, _SECONDS_OF_A_NUMBER = 4e-6, 4e-10
"""Time of a core for a query besides the products, and for a number of a whole key that is fetched."""
GROWTH = 0.15
"""Exponent by which the work of a query grows with the number of keys."""


@dataclass(frozen=True)
class RamBudget:
    """RAM for the part of the join that one machine does, and the workers that share it."""

    ram: int
    """Bytes of RAM."""
    workers: int
    """Number of workers."""
    processes: bool = False
    """Whether workers are processes: then each has its own mapped files and libraries."""

    @classmethod
    def of(cls, ram: int | None, engine: Engine) -> "RamBudget":
        """Returns the budget of `ram` bytes (default: half of this machine's), for as many workers as can share it."""
        ram = half_of_machine_ram() if ram is None else ram
        processes = engine.separate_processes
        fitting = ram // _PROCESS if processes else (ram - _LIBRARIES) // _THREAD
        workers = engine.cores if engine.requested_threads == engine.cores else min(engine.cores, fitting)
        return cls(ram, max(1, workers), processes=processes)

    def __post_init__(self) -> None:
        least = _PROCESS * self.workers if self.processes else _LIBRARIES + _THREAD * self.workers
        if self.ram < least:
            raise InputError(
                f"--ram {self.ram >> 20}M is too little for {self.workers} worker(s); give at least {least >> 20}M, "
                "or fewer --threads"
            )

    @property
    def usable(self) -> int:
        """Bytes that are left beside the libraries."""
        return self.ram - _LIBRARIES

    @property
    def room(self) -> int:
        """Bytes of mapped files that a process has in RAM at a time."""
        return max(64 << 20, self.usable // 3 // (self.workers if self.processes else 1))

    def queries(self, scan_width: int, kept: int, visits: float) -> int:
        """Returns the size of a block of queries: their vectors, best rows and visits take half of the budget."""
        each = 4 * scan_width + 32 * kept + 64 * visits + 512
        return max(1000, min(_MOST_QUERIES, int(self.usable / 2 / self.workers / each)))

    def rows(self, key_bytes: int) -> int:
        """Returns how many rows are moved to their partitions at a time: more of them make longer writes."""
        return max(4096, min(1 << 21, self.usable // 8 // (key_bytes + 64)))

    def points(self, width: int) -> int:
        """Returns the most sampled keys from which the scan space and the partitions may be learned."""
        return max(4096, self.usable // 6 // (4 * width))


@dataclass(frozen=True)
class JoinWorkload:
    """The sizes on which the cost of a join depends."""

    keys: int
    """Number of keys that are searched."""
    own: int
    """Number of queries that are entries."""
    others: int
    """Number of queries that are not entries: their vectors are copied, too."""
    width: int
    """Dimensions of a key."""
    table_bytes: int
    """Size of the neighbour table."""
    key_bytes: int = 2
    """Bytes of a number of a whole key."""
    neighbours: int = 4
    """Number of neighbours."""


@dataclass(frozen=True)
class JoinEstimate:
    """Time and disk space that a join is expected to take."""

    seconds: float
    """Seconds that the join will take."""
    disk: int
    """Bytes on disk that the join will need."""

    @classmethod
    def of(cls, load: JoinWorkload, recall: float, workers: int) -> "JoinEstimate":
        """Returns the estimate for a number of workers, each on a core like this machine's."""
        slower = 1 - _PRODUCTS + _PRODUCTS * GFLOPS / gflops_of_a_core()
        more = max(1.0, load.neighbours / _NEIGHBOURS) ** _MORE_NEIGHBOURS
        seconds = core_seconds(load.keys, load.own + load.others, load.width, recall=recall) * slower * more / workers
        # Whole keys, half as many dimensions for the scan, twice while they are ordered; labels, documents, norms.
        vectors = (load.keys + load.others) * ((load.key_bytes + 2) * load.width + 32)
        return cls(seconds, vectors + load.table_bytes)


def plan_seconds(queries: int, scanned: float, width: int, *, fetched: int) -> float:
    """Returns the time of one core like this one for a tuned join, which is known better than what is announced before.

    A query scans this many keys of `width` dimensions, and `fetched` numbers of whole keys are fetched for it.
    """
    rate = gflops_of_a_core() * 1e9 * (_BFLOAT16 if HAS_BFLOAT16 else 1)
    return queries * (_SECONDS_OF_A_QUERY + 2 * scanned * width / rate + _SECONDS_OF_A_NUMBER * fetched)


def core_seconds(keys: float, queries: float, width: int, *, recall: float) -> float:
    """Returns the time of a join on the core on which the constants were measured."""
    work = (_MICROSECONDS + _MICROSECONDS_PER_DIMENSION * width) * 1e-6 * (max(keys, 1) / 1e6) ** GROWTH
    thorough = (0.05 / max(1 - recall, 1e-3)) ** 0.6
    return queries * work * thorough


def gflops_of_a_core() -> float:
    """Measures the speed of one core now, in single-precision products of the size that the join uses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    queries, keys = torch.randn(512, 128), torch.randn(256, 128)
    torch.matmul(queries, keys.T)
    began = time.perf_counter()
    for _ in range(100):
        torch.matmul(queries, keys.T)
    torch.set_num_threads(threads)
    return 100 * 2 * 512 * 256 * 128 / (time.perf_counter() - began) / 1e9


def format_seconds(seconds: float) -> str:
    """Returns a duration as text, such as 40 s, 7 min or 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
