"""Limits of scale: what fails first as a memory grows, and what would help."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from spalm.memory.shards import SHARD_BYTES
from spalm.neighbours.join.cost import GFLOPS
from spalm.neighbours.partitions import POINTS
from spalm.planning.planned_memory import Cluster, PlannedMemory
from spalm.planning.stages import join_cost

_DAY = 86400.0
"""Number of seconds in a day."""


@dataclass(frozen=True)
class ScaleLimit:
    """A statement that holds up to some number of tokens."""

    what: str
    """The statement."""
    tokens: float
    """Number of tokens up to which the statement holds."""
    remedy: str
    """What to change for a larger memory."""


def scale_limits(memory: PlannedMemory, cluster: Cluster) -> list[ScaleLimit]:
    """Returns the limits of a memory of this kind, the lowest first."""

    def holds_until(holds: Callable[[PlannedMemory], bool]) -> float:
        """Returns the number of tokens up to which a condition holds, by bisection."""
        low, high = 1e3, 1e18  # tokens
        while high / low > 1.01:
            middle = sqrt(low * high)
            low, high = (middle, high) if holds(replace(memory, tokens=middle)) else (low, middle)
        return low

    flops_of_a_day = cluster.cores * GFLOPS * 1e9 * _DAY
    found = [
        ScaleLimit(
            "one machine moves the keys into order within a day",
            holds_until(lambda one: join_cost(one, cluster).alone / cluster.storage <= _DAY),
            "every machine moves the keys of its own partitions, into files of its own",
        ),
        ScaleLimit(
            "partitions are learned from as many points as they should be, in an eighth of a machine's RAM",
            holds_until(lambda one: POINTS * one.partitions * 4 * one.scan <= cluster.ram / 8),
            "they are learned from fewer, and recall costs more; or groups first, each learned by another machine",
        ),
        ScaleLimit(
            "one machine finds which partitions are near which within a day",
            holds_until(lambda one: 2 * one.scan * one.partitions**2 <= flops_of_a_day),
            "compare only the partitions of near groups",
        ),
        ScaleLimit(
            "a machine's RAM holds the partitions once for each of its cores",
            holds_until(lambda one: join_cost(one, cluster).ram <= cluster.ram),
            "fewer workers on a machine (--ram); or partitions in a mapped file, which they share",
        ),
        ScaleLimit(
            "a machine's RAM holds the partitions and the documents' names",
            holds_until(lambda one: one.opened + one.names <= cluster.ram),
            "names stay in the catalogue, partitions in a mapped file; or several memories, each asked",
        ),
        ScaleLimit(
            "finding a key's partition is less than half of the join",
            holds_until(lambda one: one.assigning_seconds < one.joining_seconds / 2),
            "groups of groups: a third level",
        ),
        ScaleLimit(
            "a folder holds a million shards",
            holds_until(lambda one: one.tokens * 2 * one.width / SHARD_BYTES <= 1e6),
            "larger shards: SHARD_BYTES",
        ),
        ScaleLimit(
            "partitions have numbers of 32 bits",
            holds_until(lambda one: one.partitions < 2**31),
            "64 bits",
        ),
    ]
    return sorted(found, key=lambda limit: limit.tokens)
