"""The plan of a memory, before it is made: core-hours, RAM, disk and network of each stage, and the limits of scale."""

from dataclasses import asdict
from typing import Any

from spalm.neighbours.join.cost import GFLOPS, GROWTH
from spalm.planning.limits import scale_limits
from spalm.planning.planned_memory import DOCUMENT, MEASURED, Cluster, PlannedMemory
from spalm.planning.stages import READING_GFLOPS, most_disk, planned_stages, query_cost
from spalm.planning.units import format_bytes, format_count


def plan_memory(memory: PlannedMemory, cluster: Cluster) -> dict[str, Any]:
    """Returns the whole plan as plain figures: bytes, hours, tokens."""
    stages = planned_stages(memory, cluster)
    return {
        "tokens": memory.tokens,
        "flops": memory.flops,
        "cluster": asdict(cluster),
        "stages": [{**asdict(stage), "hours": stage.hours(cluster)} for stage in stages],
        "most_disk": most_disk(stages),
        "serving": query_cost(memory, cluster),
        "limits": [asdict(limit) for limit in scale_limits(memory, cluster)],
        "assumptions": assumptions(memory, cluster),
    }


def assumptions(memory: PlannedMemory, cluster: Cluster) -> list[str]:
    """Returns the assumptions of the plan, one line each."""
    return [
        f"keys of width {memory.width}, compared in {memory.scan} dimensions (half; seen: 96 of 512, 288 of 576)",
        f"windows of {memory.segment} tokens, {memory.stride} of them new",
        f"{memory.neighbours.count} neighbours at a recall of {memory.neighbours.recall}",
        f"cores with {GFLOPS:.0f} GFLOP/s in products of 512 x 128 x 256, {READING_GFLOPS:.0f} when they make keys",
        f"what the join takes grows as keys^{1 + GROWTH}, which was measured up to {format_count(MEASURED)}",
        f"a machine reads and writes {format_bytes(cluster.storage)} a second; nothing of what it reads is cached",
        f"documents of {DOCUMENT} tokens",
    ]
