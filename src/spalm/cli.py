"""The command line: verbs in the order of the pipeline, each calling one function."""

import errno
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from spalm.artifact import Artifact
from spalm.console import say
from spalm.corpus import OFFICIAL, download
from spalm.errors import InputError
from spalm.learning import Hardware
from spalm.memory import Memory, describe, is_memory
from spalm.neighbours import Kind, make_searcher, parse_size, workers
from spalm.recipe import MODELS, ROWS, ModelName, Recipe, RowName, Run, read_recipe
from spalm.semiparametric import FinishedRun, HeldOut
from spalm.settings import described
from spalm.study import ANALYSES, COUNTS, asked_for, available, print_results, study, vary_neighbours, write_report

app = typer.Typer(
    help="Language models with a short-term and a long-term memory.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)

RecipeArgument = Annotated[str, typer.Argument(help="Name of a recipe, or the path of a .yaml file.")]
MemoryArgument = Annotated[Path, typer.Argument(help="Folder of a memory, such as RUN/memory.")]
RunArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a finished run.")]
ModelArgument = Annotated[ModelName, typer.Argument(help=f"One of {', '.join(MODELS)}.")]
RowArgument = Annotated[RowName, typer.Argument(help=f"One of {', '.join(ROWS)}.")]
Assignments = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the recipe.")
]
Out = Annotated[Path, typer.Option(help="Folder of the run; each stage is a folder below it.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: all cores.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="training.bf16=true evaluation.bf16=true, for GPUs.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the training step (for GPUs).")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Log to TensorBoard too (needs the extra).")]
Ram = Annotated[
    str | None, typer.Option(help="Memory for the search for neighbours, such as 4G; default half of it all.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Begin unfinished stages again from nothing.")]


@app.command(name="download")
def download_(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(OFFICIAL)}.")],
    to: Annotated[Path, typer.Option(help="Folder to put it in.")] = Path("data"),
) -> None:
    """Fetch an official corpus, check its digest, unpack it; resumes if interrupted."""
    say(f"{download(name, to)} is ready; use it with SPALM_DATA={to}")


@app.command()
def corpus(recipe: RecipeArgument, out: Out, settings: Assignments = None, restart: Restart = False) -> None:
    """Turn a recipe's text into token arrays."""
    made = Run(_recipe(recipe, settings), out, Hardware(), restart=restart).corpus
    typer.echo(json.dumps(made.facts, indent=2))


@app.command()
def train(
    recipe: RecipeArgument,
    model: ModelArgument,
    out: Out,
    settings: Assignments = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    compile: Compile = False,
    tensorboard: Board = False,
    ram: Ram = None,
    restart: Restart = False,
) -> None:
    """Train one model of a recipe."""
    hardware = Hardware(device, threads, compile)
    made = Run(_recipe(recipe, settings, bf16), out, hardware, tensorboard, restart, _bytes(ram)).model(model)
    typer.echo(json.dumps(made.facts, indent=2))


@app.command(name="remember")
def remember_(
    recipe: RecipeArgument,
    out: Out,
    settings: Assignments = None,
    text: Annotated[list[Path] | None, typer.Option(help="Files or folders to remember too; may be repeated.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    restart: Restart = False,
) -> None:
    """Put every position of a recipe's training text, and of further texts, into its long-term memory."""
    run = Run(_recipe(recipe, settings), out, Hardware(device, threads), restart=restart)
    typer.echo(json.dumps(describe(run.remember(text or [])), indent=2, ensure_ascii=False))


@app.command()
def forget(
    memory: MemoryArgument, documents: Annotated[list[str], typer.Argument(help="Names of documents to forget.")]
) -> None:
    """Forget documents: from now on no search finds anything of them. `compact` removes their bytes."""
    say(f"{memory}: forgot {Memory(memory).forget(documents):,} document(s)")


@app.command()
def compact(memory: MemoryArgument) -> None:
    """Rewrite a memory without what was forgotten, and join small shards."""
    say(f"{memory}: freed {Memory(memory).compact():,} bytes")


@app.command()
def verify(directory: Annotated[Path, typer.Argument(help="A memory, or a finished stage.")]) -> None:
    """Read every byte and compare it with what was written."""
    opened = Memory(directory) if is_memory(directory) else Artifact(directory)
    opened.verify()
    say(f"{directory}: every byte is as it was written")


@app.command()
def neighbours(
    recipe: RecipeArgument,
    out: Out,
    settings: Assignments = None,
    recall: Annotated[float | None, typer.Option(help="neighbours.recall: share of true neighbours to find.")] = None,
    ram: Ram = None,
    device: Device = "auto",
    threads: Threads = None,
    restart: Restart = False,
) -> None:
    """Find the nearest entries of every training, dev and test position, once and for all."""
    wanted = [] if recall is None else [f"neighbours.recall={recall}"]
    hardware = Hardware(device, threads)
    made = Run(_recipe(recipe, [*(settings or []), *wanted]), out, hardware, False, restart, _bytes(ram))
    typer.echo(json.dumps(made.neighbours.facts, indent=2))


@app.command()
def index(
    memory: MemoryArgument,
    out: Annotated[Path, typer.Option(help="Folder for the index.")],
    kind: Annotated[Kind, typer.Option(help="exact, faiss or scann (an extra).")] = "faiss",
    recall: Annotated[float, typer.Option(help="Share of true neighbours to find.")] = 0.95,
    count: Annotated[int, typer.Option(help="Neighbours by which the recall is measured.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Of the samples.", min=0)] = 1,
) -> None:
    """Build an index of a memory for generation and serving, and measure its recall against exact search."""
    with workers() as in_parallel:
        _, described = make_searcher(Memory(memory), kind, out, recall, count, seed, in_parallel)
    typer.echo(json.dumps(asdict(described), indent=2))


@app.command()
def evaluate(
    recipe: RecipeArgument,
    model: RowArgument,
    out: Out,
    settings: Assignments = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    ram: Ram = None,
    restart: Restart = False,
) -> None:
    """Score dev and test with one model of a recipe, keeping every token's log-probability."""
    run = Run(_recipe(recipe, settings, bf16), out, Hardware(device, threads), False, restart, _bytes(ram))
    print_results(run.rows(model), run.recipe.title, [], Console())


@app.command()
def run(
    recipe: RecipeArgument,
    out: Out,
    settings: Assignments = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    compile: Compile = False,
    tensorboard: Board = False,
    ram: Ram = None,
    restart: Restart = False,
) -> None:
    """Carry out a whole recipe: corpus, models, evaluation, table. Finished stages are skipped, killed ones resume."""
    hardware = Hardware(device, threads, compile)
    Run(_recipe(recipe, settings, bf16), out, hardware, tensorboard, restart, _bytes(ram)).everything(Console())


@app.command(name="study")
def study_(
    directory: RunArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help=f"Of {', '.join(ANALYSES)}; default: all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, CSV, PNG and SVG; default: DIR/study/SPLIT.")
    ] = None,
    split: Annotated[HeldOut, typer.Option(help="dev or test.")] = "test",
    model: Annotated[RowName, typer.Option(help="Whose gains over transformer-xl `outputs` counts.")] = "spalm",
    first: Annotated[
        int | None, typer.Option(help="First token of the passage to show; default: where memory helped most.", min=0)
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of the passage.", min=1, max=400)] = None,
) -> None:
    """Analyse a finished run: a table, its data, and a picture for each analysis."""
    run = FinishedRun(directory)
    where = out or directory / "study" / split
    study(asked_for(run, split, model, first, length), names or available(run), where, Console())
    say(f"data and pictures are in {where}")


@app.command(name="vary")
def vary_(
    directory: RunArgument,
    counts: Annotated[list[int] | None, typer.Option("--count", help="Neighbours; may be repeated.", min=0)] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train SPALM anew with each; else only at test.")] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Score dev and test with other numbers of neighbours, for `spalm study DIR neighbours`."""
    vary_neighbours(FinishedRun(directory), tuple(counts or COUNTS), retrain, Hardware(device, threads))


@app.command()
def report(
    directory: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Folder for the page; default: DIR/report.")] = None,
) -> None:
    """Write a finished run as one HTML page that needs nothing else: results, figures, passages, settings."""
    say(f"open {write_report(FinishedRun(directory), out or directory / 'report').resolve().as_uri()}")


@app.command()
def explore(
    directory: RunArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback let other machines in.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.", min=0, max=65535)] = 8765,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Look into the memory of a finished run in the browser: any text, token by token, with its neighbours."""
    from spalm.serving import allowed_hosts, make_app, open_explorer, serve  # not needed by any other verb

    explorer = open_explorer(FinishedRun(directory), Hardware(device, threads))
    serve(make_app(explorer, allowed_hosts(host)), host, port, "the explorer")


@app.command()
def settings(about: Annotated[str, typer.Argument(help="Only keys that begin so, such as training.")] = "") -> None:
    """List every setting of a recipe: key, default, meaning."""
    table = Table(Column("key", no_wrap=True), "default", "meaning", box=None)
    for key, default, meaning in described(Recipe):
        if key.startswith(about):
            table.add_row(escape(key), escape(default), escape(" ".join(meaning.split())))
    Console().print(table)


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="A memory, or a finished stage.")],
    documents: Annotated[bool, typer.Option("--documents", help="Of a memory: list its documents.")] = False,
    versions: Annotated[bool, typer.Option("--versions", help="Of a memory: list what was done to it.")] = False,
) -> None:
    """Print what an artifact says of itself."""
    if not is_memory(directory):
        typer.echo(json.dumps(Artifact(directory).manifest, indent=2, ensure_ascii=False))
        return
    memory = Memory(directory)
    if documents:
        held = memory.entries().documents_held
        for name, first, count in zip(held.names, held.first_ids, held.entries):
            typer.echo(f"{first}\t{count}\t{name}")
    elif versions:
        for version in memory.versions():
            typer.echo(f"{version.version}\t{version.at}\t{version.what}")
    else:
        typer.echo(json.dumps(describe(memory), indent=2, ensure_ascii=False))


def _recipe(name: str, settings: list[str] | None, bf16: bool = False) -> Recipe:
    switches = ["training.bf16=true", "evaluation.bf16=true"] if bf16 else []
    return read_recipe(name, [*(settings or []), *switches])


def _bytes(ram: str | None) -> int | None:
    return None if ram is None else parse_size(ram)


_STOPPED = 130
"""The exit code of a command that was stopped from the keyboard."""


def main() -> None:
    """The `spalm` command: what a user can mend is told in one line, without a traceback."""
    try:
        app()
    except SystemExit as end:
        if end.code == _STOPPED:
            say("spalm: stopped; run the same command again to go on from here")
        raise
    except InputError as error:
        _fail(str(error))
    except OSError as error:
        _fail(_explain(error))


def _explain(error: OSError) -> str:
    where = error.filename or "the output folder"
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in reason:
        return f"no space left to write {where}; make room or choose another --out, then run the same command to go on"
    return f"{where}: {reason}"


def _fail(message: str) -> None:
    say(f"spalm: {message}")
    sys.exit(1)
