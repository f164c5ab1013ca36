"""The cost of each stage (core-hours, RAM, disk and network for keys, neighbours and index) and of a live query.

Everything is computed from a few constants and from the sizes of what the stages read and write. Constants followed by
the name of a benchmark were measured by it on one core of an AMD EPYC with 97 GFLOP/s in the products of the join. All
bytes read and written count as network, because storage is shared on a cluster.
"""

from dataclasses import dataclass

from spalm.memory.shards import SHARD_BYTES
from spalm.planning.planned_memory import MEASURED, Cluster, PlannedMemory

READING_GFLOPS = 84.0
"""Speed of a core that makes keys with the network of wikitext103 (make bench-plan)."""
_FRESH, _FRESH_GROWTH, _MOST_FRESH = 5.3, 0.43, 32.0
"""Number of keys in the scan space that the join fetches for a query, where a key fetched for a block counts once:
its value at 4 million keys; the exponent of its growth from 2.9 at 1 million (make bench-plan); its assumed maximum."""
_WHOLE = 8.0
"""Number of whole keys with which a query of the join is compared (make bench-plan)."""
_FILLING_MICROSECONDS = 9.0
"""Time of a core for each key of an index, apart from finding its partition (make bench-disk)."""
_EFFORT = 8
"""Number of lists that a live query reads for a recall of 0.95 (make bench-disk)."""
_PROCESS = 0.7e9
"""Bytes of RAM of a process with its libraries (make bench-disk)."""
_CANDIDATES = 20
"""Number of whole keys with which a live query for 4 neighbours is compared."""
_PAGE = 4096
"""Bytes of a page on disk."""
_QUERY_MILLISECONDS = 1.0
"""Time of a live query when everything is in RAM (make bench-disk)."""


@dataclass(frozen=True)
class PlannedStage:
    """The cost of one stage."""

    name: str
    core_hours: float
    ram: float
    """RAM that a machine needs, in bytes."""
    kept: float
    """Bytes that stay on disk."""
    scratch: float
    """Further bytes on disk while the stage runs."""
    read: float
    """Bytes read."""
    written: float
    """Bytes written."""
    alone: float = 0.0
    """Bytes that a single machine must read and write, however many machines there are."""

    def hours(self, cluster: Cluster) -> float:
        """Returns the time on all machines: the longer of computing and storage, plus what one machine does alone."""
        computing = self.core_hours / (cluster.machines * cluster.cores)
        shared = (self.read + self.written - self.alone) / (cluster.machines * cluster.storage) / 3600
        return max(computing, shared) + self.alone / cluster.storage / 3600


def planned_stages(memory: PlannedMemory, cluster: Cluster) -> list[PlannedStage]:
    """Returns the costs of keys, neighbours and index, in the order in which they are made."""
    return [_keys_cost(memory), join_cost(memory, cluster), _index_cost(memory, cluster)]


def most_disk(stages: list[PlannedStage]) -> float:
    """Returns the most bytes on disk at a time: what earlier stages have left, and the scratch of the current one."""
    return max(sum(each.kept for each in stages[: number + 1]) + stage.scratch for number, stage in enumerate(stages))


def _keys_cost(memory: PlannedMemory) -> PlannedStage:
    """Returns the cost of keys: hidden states of overlapping windows, in half precision, and the next tokens."""
    entries = memory.tokens * (2 * memory.width + 4)
    return PlannedStage(
        "keys",
        memory.flops / (READING_GFLOPS * 1e9) / 3600,
        _PROCESS + 2 * SHARD_BYTES,
        kept=entries,
        scratch=0.0,
        read=4 * memory.tokens * memory.segment / memory.stride,
        written=entries,
    )


def join_cost(memory: PlannedMemory, cluster: Cluster) -> PlannedStage:
    """Returns the cost of the join.

    Keys are read and assigned to partitions, then read again and sorted by partition; then each block reads the
    partitions around it.
    """
    tokens, count = memory.tokens, memory.neighbours.count
    whole, scan, attributes = 2 * memory.width, 2 * memory.scan, 20  # bytes of a key; attributes: label, document, norm
    assigned, ordered = scan + 8, whole + scan + attributes
    answer = 8 + 12 * count
    table = tokens * count * (12 if tokens > 2**31 else 8)
    moving = tokens * (whole + assigned + ordered)
    fresh = min(_MOST_FRESH, _FRESH * (tokens / MEASURED) ** _FRESH_GROWTH)
    joining = tokens * (fresh * (scan + attributes) + _WHOLE * whole + answer)
    return PlannedStage(
        "neighbours",
        tokens * memory.joining_seconds / 3600,
        (_PROCESS + memory.opened) * cluster.cores + memory.names,
        kept=table,
        scratch=tokens * (assigned + ordered + answer),
        read=tokens * (whole + whole + assigned) + joining,
        written=tokens * (assigned + ordered + 2 * answer),
        alone=moving,
    )


def _index_cost(memory: PlannedMemory, cluster: Cluster) -> PlannedStage:
    """Returns the cost of an index on disk.

    Keys are read and sorted into lists of codes. One machine merges these, and reads all keys again to measure recall.
    """
    keys, lists = memory.tokens * 2 * memory.width, memory.tokens * (memory.scan + 8)
    seconds = memory.tokens * (_FILLING_MICROSECONDS * 1e-6 + memory.assigning_seconds)
    return PlannedStage(
        "index",
        seconds / 3600,
        (_PROCESS + memory.opened) * cluster.cores + memory.names,
        kept=lists,
        scratch=lists,
        read=2 * keys + lists,
        written=2 * lists,
        alone=keys + 2 * lists,
    )


def query_cost(memory: PlannedMemory, cluster: Cluster) -> dict[str, float]:
    """Returns the cost of a live query of an index on disk of which nothing is cached."""
    lists = _EFFORT * memory.partition * (memory.scan + 8)
    keys = _CANDIDATES * (2 * memory.width + _PAGE)
    seconds = memory.choosing_seconds + (lists + keys) / cluster.storage
    return {
        "ram": _PROCESS + memory.opened + memory.names,
        "bytes_read": lists + keys,
        "milliseconds": 1000 * seconds + _QUERY_MILLISECONDS,
    }
