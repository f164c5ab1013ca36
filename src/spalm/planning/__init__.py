"""A recipe, a number of tokens and machines in, a plan out: what a memory will cost, stage by stage."""

from spalm.planning.display import print_plan
from spalm.planning.plan import plan_memory
from spalm.planning.planned_memory import Cluster, PlannedMemory
from spalm.planning.units import format_bytes, format_count, parse_count

__all__ = [
    "Cluster",
    "PlannedMemory",
    "format_bytes",
    "format_count",
    "parse_count",
    "plan_memory",
    "print_plan",
]
