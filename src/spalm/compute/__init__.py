"""How and where work runs: hardware, threads, ranks, RAM, engines (this machine or a Ray cluster)."""

from spalm.compute.engine import Engine, Job, Part, ProgressCallback, SentByFields, in_order, parts, undone
from spalm.compute.execution import Execution
from spalm.compute.hardware import Hardware, autocast, give_back_freed_memory, keep_freed_memory
from spalm.compute.local_engine import LOCAL, LocalEngine, cores_here
from spalm.compute.open_engine import EngineName, open_engine
from spalm.compute.ranks import Ranks, ranks_of_torchrun

__all__ = [
    "Engine",
    "EngineName",
    "Execution",
    "Hardware",
    "Job",
    "LOCAL",
    "LocalEngine",
    "Part",
    "ProgressCallback",
    "Ranks",
    "SentByFields",
    "autocast",
    "cores_here",
    "give_back_freed_memory",
    "in_order",
    "keep_freed_memory",
    "open_engine",
    "parts",
    "ranks_of_torchrun",
    "undone",
]
