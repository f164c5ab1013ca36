"""A job and its parts in, their results out: on the threads of this machine, or on the machines of a Ray cluster."""

from spalm.engine.choosing import EngineName, open_engine
from spalm.engine.contract import Engine, Job, Part, Told, Travelling, in_order, parts, undone
from spalm.engine.local import LOCAL, LocalEngine, cores_here

__all__ = [
    "LOCAL",
    "Engine",
    "EngineName",
    "Job",
    "LocalEngine",
    "Part",
    "Told",
    "Travelling",
    "cores_here",
    "in_order",
    "open_engine",
    "parts",
    "undone",
]
