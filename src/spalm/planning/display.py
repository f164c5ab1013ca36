"""Printing a plan: a table of the stages, the cost of a query, the limits of scale, the assumptions."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from spalm.planning.planned_memory import Cluster
from spalm.planning.units import format_bytes, format_count

_GPU = 100e12
"""Assumed speed of a GPU in FLOP/s."""


def print_plan(planned: dict[str, Any], console: Console) -> None:
    """Prints a plan that `plan_memory` returned."""
    cluster = Cluster(**planned["cluster"])
    machines = f"{cluster.machines:,} machine(s) of {cluster.cores} cores and {format_bytes(cluster.ram)}"
    table = Table(title=f"{format_count(planned['tokens'])} tokens, {machines}", box=None, title_justify="left")
    for heading in ("", "core-hours", "hours", "RAM", "disk", "scratch", "read", "written"):
        table.add_column(heading, justify="right" if heading else "left")
    for stage in planned["stages"]:
        sizes = (format_bytes(stage[name]) for name in ("ram", "kept", "scratch", "read", "written"))
        table.add_row(stage["name"], f"{stage['core_hours']:,.1f}", f"{stage['hours']:,.2f}", *sizes)
    total = {name: sum(stage[name] for stage in planned["stages"]) for name in ("core_hours", "hours", "kept")}
    table.add_row("all", f"{total['core_hours']:,.1f}", f"{total['hours']:,.2f}", "", format_bytes(total["kept"]))
    console.print(table)
    for line in _sentences(planned):
        console.print(line, highlight=False, soft_wrap=True)


def _sentences(planned: dict[str, Any]) -> Iterator[str]:
    """Yields the lines below the table."""
    live = planned["serving"]
    yield (
        f"a live query of an index on disk: {format_bytes(live['bytes_read'])} read, "
        f"about {live['milliseconds']:.0f} ms with nothing cached; {format_bytes(live['ram'])} of RAM"
    )
    yield f"at most {format_bytes(planned['most_disk'])} on disk at a time"
    hours = planned["flops"] / _GPU / 3600
    yield f"the keys are {planned['flops']:.2g} FLOP: {hours:,.1f} hours of a GPU at {_GPU / 1e12:.0f} TFLOP/s"
    yield "what breaks first:"
    for limit in planned["limits"]:
        broken = limit["tokens"] < planned["tokens"]
        yield f"  {format_count(limit['tokens']):>6} tokens  {'broken' if broken else 'holds '}  {limit['what']}"
        if broken:
            yield f"{'then: ':>29}{limit['remedy']}"
    yield "assumed:"
    yield from (f"  {assumption}" for assumption in planned["assumptions"])
