"""Execution of work: hardware, threads, ranks, RAM, engines (this machine or a Ray cluster)."""

from spalm.compute.engine import (
    Engine,
    Job,
    JobPart,
    ProgressCallback,
    SentByFields,
    in_order,
    split_rows,
    unfinished_parts,
)
from spalm.compute.execution import Execution
from spalm.compute.hardware import Hardware, autocast, has_bf16
from spalm.compute.local_engine import LOCAL, LocalEngine
from spalm.compute.open_engine import EngineName, open_engine
from spalm.compute.ram import half_of_machine_ram, keep_freed_memory, machine_ram, parse_size, release_freed_memory
from spalm.compute.ranks import Ranks, ranks_of_torchrun
from spalm.compute.threads import available_cores, map_in_threads, set_threads, threads_for, using_threads

__all__ = [
    "Engine",
    "EngineName",
    "Execution",
    "Hardware",
    "Job",
    "JobPart",
    "LOCAL",
    "LocalEngine",
    "ProgressCallback",
    "Ranks",
    "SentByFields",
    "autocast",
    "available_cores",
    "half_of_machine_ram",
    "has_bf16",
    "in_order",
    "keep_freed_memory",
    "machine_ram",
    "map_in_threads",
    "open_engine",
    "parse_size",
    "ranks_of_torchrun",
    "release_freed_memory",
    "set_threads",
    "split_rows",
    "threads_for",
    "unfinished_parts",
    "using_threads",
]
