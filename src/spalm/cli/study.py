"""Verbs that show something: analyses, report, explorer, plans, settings, artifacts."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.padding import Padding

from spalm.choices import ANALYSIS_NAMES, LARGEST, HeldOut, RowName
from spalm.cli.application import app
from spalm.cli.options import (
    PORT,
    AllowHost,
    Assignments,
    Device,
    Host,
    NoKey,
    Port,
    Ram,
    RecipeArgument,
    Restart,
    RunArgument,
    Threads,
    given_path,
    holds_memory,
    memory_at,
)
from spalm.console import Console, print_fields, print_json, say
from spalm.errors import InputError


@app.command(name="study")
def study_(
    directory: RunArgument,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help=f"Some of {', '.join(ANALYSIS_NAMES)}; default: all."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=given_path, help="Folder for JSON, CSV, PNG and SVG; default: DIR/study/SPLIT."),
    ] = None,
    split: Annotated[HeldOut, typer.Option(help="dev or test.")] = "test",
    model: Annotated[RowName, typer.Option(help="Model whose gains over transformer-xl `outputs` counts.")] = "spalm",
    first: Annotated[
        int | None,
        typer.Option(help="First token of the passage to show; default: where memory helped most.", min=0, max=LARGEST),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Number of tokens of the passage.", min=1, max=400)] = None,
) -> None:
    """Analyse a finished run: a table, its data, and a picture for each analysis.

    `overlap` also works on what `spalm attach` made.
    """
    from spalm.attachment import is_attached
    from spalm.files import own_folder
    from spalm.runs import FinishedRun
    from spalm.study import analyse_attached, available_analyses, make_request, run_analyses

    if is_attached(directory):
        where = out or own_folder(directory, "study")
        analyse_attached(directory, names or [], where, console=Console())
        say(f"data and pictures are in {where}")
        return
    run = FinishedRun(directory)
    where = out or own_folder(directory, "study", split)
    request = make_request(run, split, model, first=first, length=length)
    run_analyses(request, names or available_analyses(run), where, console=Console())
    say(f"data and pictures are in {where}")


@app.command(name="vary")
def vary_(
    directory: RunArgument,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="With --steps: settings laid over the recipe of each run."),
    ] = None,
    counts: Annotated[
        list[int] | None, typer.Option("--count", help="Number of neighbours; may be repeated.", min=0, max=LARGEST)
    ] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train again with each; else vary at test only.")] = False,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Numbers of training steps, such as 500,2000: a whole run with each, below DIR."
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    ram: Ram = None,
    restart: Restart = False,
) -> None:
    """Try other numbers of neighbours or of training steps, for `spalm study DIR neighbours` and `strength`.

    What was killed continues when the same command is given again.
    """
    from spalm.compute import Execution, Hardware, parse_size
    from spalm.runs import FinishedRun
    from spalm.study import COUNTS, vary_neighbours, vary_steps

    size = None if ram is None else parse_size(ram)
    execution = Execution(Hardware(device, threads), ram=size, restart=restart)
    if steps is None:
        if settings:
            raise InputError(f"{settings[0]} belongs to --steps, which makes whole runs; leave it out")
        vary_neighbours(FinishedRun(directory), tuple(counts or COUNTS), execution, retrain=retrain)
        return
    if counts or retrain:
        raise InputError("--steps makes whole runs, --count and --retrain vary the neighbours; give one of them")
    levels = _whole_numbers(steps, "--steps")
    vary_steps(FinishedRun(directory), levels, execution, assignments=settings or [], console=Console())


def _whole_numbers(text: str, option: str) -> list[int]:
    """Returns the numbers of an option such as 500,2000."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", part) for part in parts):
        raise InputError(f"{option} {text[:100]!r}: give numbers from 1 to 999999999, such as 500,2000")
    return [int(part) for part in parts]


@app.command(name="plan")
def plan_(
    recipe: RecipeArgument,
    tokens: Annotated[str, typer.Option(help="Number of tokens to remember, such as 103M, 852M or 1T.")],
    settings: Assignments = None,
    machines: Annotated[int, typer.Option(help="Number of machines of the cluster.", min=1, max=LARGEST)] = 1,
    cores: Annotated[
        int | None, typer.Option(help="Cores of a machine; default: this one's.", min=1, max=LARGEST)
    ] = None,
    ram: Annotated[str | None, typer.Option(help="RAM of a machine, such as 256G; default: this one's.")] = None,
    storage: Annotated[
        str,
        typer.Option(
            help="Bytes a second that each machine reads or writes; with one file server, a machine's share of it."
        ),
    ] = "1G",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan the cost of a memory before it is made: core-hours, RAM, disk, network, and what breaks first."""
    from spalm.compute import machine_ram, parse_size
    from spalm.planning import Cluster, PlannedMemory, parse_count, plan_memory, print_plan
    from spalm.runs import read_recipe

    memory = PlannedMemory.of(read_recipe(recipe, settings or []), parse_count(tokens))
    size = machine_ram() if ram is None else parse_size(ram)
    cluster = Cluster(machines, cores or os.cpu_count() or 1, size, parse_size(storage, "--storage"))
    planned = plan_memory(memory, cluster)
    print_json(planned) if as_json else print_plan(planned, Console())


@app.command()
def report(
    directory: RunArgument,
    out: Annotated[
        Path | None, typer.Option(parser=given_path, help="Folder for the page; default: DIR/report.")
    ] = None,
) -> None:
    """Write a finished run as one HTML page that needs nothing else: results, figures, passages, settings."""
    from spalm.runs import FinishedRun
    from spalm.study import write_report

    say(f"open {write_report(FinishedRun(directory), out).resolve().as_uri()}")


@app.command()
def explore(
    directory: RunArgument,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    no_key: NoKey = False,
    allow_host: AllowHost = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Look into the memory of a finished run in the browser: any text, token by token, with its neighbours."""
    from spalm.compute import Hardware
    from spalm.generation import RunModels
    from spalm.runs import FinishedRun
    from spalm.server import allowed_hosts, check_access, make_explorer_server, serve

    check_access(host, key=False, no_key=no_key)
    hosts = allowed_hosts(host, allow_host or ())
    models = RunModels(FinishedRun(directory), Hardware(device, threads))
    serve(make_explorer_server(models, hosts), host, port, title="the explorer", no_key=no_key)


@app.command()
def settings(
    which: Annotated[
        str, typer.Argument(help="attach, serve, or the beginning of a recipe's keys, such as training.")
    ] = "",
) -> None:
    """List the settings of a recipe, of `attach` (for --set) or of `serve` (for --limit)."""
    from spalm.attachment import AttachSettings
    from spalm.runs import Recipe
    from spalm.server import Limits
    from spalm.settings import describe_settings

    verbs = {"attach": AttachSettings, "serve": Limits}
    listed = list(describe_settings(verbs.get(which, Recipe)))
    if which not in verbs:
        listed = [row for row in listed if row[0].startswith(which)]
    if not listed:
        groups = [*dict.fromkeys(key.partition(".")[0] for key, _, _ in describe_settings(Recipe)), *verbs]
        raise InputError(f"there are no settings {which!r}; give one of {', '.join(groups)}")
    console = Console()
    for key, default, meaning in listed:
        console.print(f"[bold]{escape(key)}[/] = {escape(default)}")
        console.print(Padding(escape(" ".join(meaning.split())), (0, 0, 0, 4)))


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(parser=given_path, help="A memory, or a finished stage.")],
    documents: Annotated[bool, typer.Option("--documents", help="List the documents of a memory.")] = False,
    versions: Annotated[bool, typer.Option("--versions", help="List the changes of a memory.")] = False,
) -> None:
    """Print the manifest of a finished stage, or a summary of a memory."""
    from spalm.artifact import Artifact
    from spalm.memory import describe_memory

    if not holds_memory(directory):
        print_json(Artifact(directory).manifest)
        return
    memory = memory_at(directory)
    if documents:
        held = memory.entries().live_documents
        for name, first, count in zip(held.names, held.first_ids, held.entries):
            print_fields(first, count, name)
    elif versions:
        for version in memory.versions():
            print_fields(version.version, version.at, version.what)
    else:
        print_json(describe_memory(memory))
