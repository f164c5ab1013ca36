"""A plan for people: a table of the stages, and in words what a query costs, what breaks first, what was assumed."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from spalm.planning.plan import Cluster, in_bytes, in_count

_GPU = 100e12
"""FLOP/s: an assumption."""


def print_plan(planned: dict[str, Any], console: Console) -> None:
    cluster = Cluster(**planned["cluster"])
    machines = f"{cluster.machines:,} machine(s) of {cluster.cores} cores and {in_bytes(cluster.ram)}"
    table = Table(title=f"{in_count(planned['tokens'])} tokens, {machines}", box=None, title_justify="left")
    for heading in ("", "core-hours", "hours", "RAM", "disk", "scratch", "read", "written"):
        table.add_column(heading, justify="right" if heading else "left")
    for stage in planned["stages"]:
        sizes = (in_bytes(stage[name]) for name in ("ram", "kept", "scratch", "read", "written"))
        table.add_row(stage["name"], f"{stage['core_hours']:,.1f}", f"{stage['hours']:,.2f}", *sizes)
    total = {name: sum(stage[name] for stage in planned["stages"]) for name in ("core_hours", "hours", "kept")}
    table.add_row("all", f"{total['core_hours']:,.1f}", f"{total['hours']:,.2f}", "", in_bytes(total["kept"]))
    console.print(table)
    for line in _in_words(planned):
        console.print(line, highlight=False, soft_wrap=True)


def _in_words(planned: dict[str, Any]) -> Iterator[str]:
    live = planned["serving"]
    yield (
        f"a live query of an index on disk: {in_bytes(live['bytes_read'])} read, about {live['milliseconds']:.0f} ms "
        f"with nothing cached; {in_bytes(live['ram'])} of RAM"
    )
    yield f"at most {in_bytes(planned['most_disk'])} on disk at a time"
    hours = planned["flops"] / _GPU / 3600
    yield f"the keys are {planned['flops']:.2g} FLOP: {hours:,.1f} hours of a GPU at {_GPU / 1e12:.0f} TFLOP/s"
    yield "what breaks first:"
    for limit in planned["limits"]:
        broken = limit["tokens"] < planned["tokens"]
        yield f"  {in_count(limit['tokens']):>6} tokens  {'broken' if broken else 'holds '}  {limit['what']}"
        if broken:
            yield f"{'then: ':>29}{limit['remedy']}"
    yield "assumed:"
    yield from (f"  {assumption}" for assumption in planned["assumptions"])
