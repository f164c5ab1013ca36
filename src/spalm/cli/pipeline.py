"""Verbs of the pipeline, from text to results."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spalm.api import carry_out
from spalm.attachment import Attached, is_attached, remember_files
from spalm.cli.options import (
    Address,
    Assignments,
    Bf16,
    Board,
    Compile,
    Device,
    Fsdp,
    MemoryArgument,
    NetworkArgument,
    OnEngine,
    Out,
    Ram,
    RecipeArgument,
    Restart,
    RowArgument,
    Threads,
    app,
    memory_at,
    path_for,
)
from spalm.compute import Execution, Hardware, open_engine, parse_size, ranks_of_torchrun
from spalm.console import say
from spalm.corpus import OFFICIAL_CORPORA, download_corpus
from spalm.errors import InputError
from spalm.maintenance import forget_with_receipt, remove_forgotten, verify_directory
from spalm.memory import describe_memory
from spalm.neighbours import IndexKind, IndexSettings, make_searcher
from spalm.runs import Recipe, Run, print_results, read_recipe


@app.command(name="download")
def download_(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(OFFICIAL_CORPORA)}.")],
    to: Annotated[Path, typer.Option(help="Folder to put it in.")] = Path("data"),
) -> None:
    """Fetch an official corpus, check its digest, unpack it; resumes if interrupted."""
    say(f"{download_corpus(name, to)} is ready; use it with SPALM_DATA={to}")


@app.command()
def corpus(recipe: RecipeArgument, out: Out, settings: Assignments = None, restart: Restart = False) -> None:
    """Turn a recipe's text into token arrays."""
    made = Run(_recipe(recipe, settings), out, Execution(restart=restart)).corpus
    typer.echo(json.dumps(made.facts, indent=2))


@app.command()
def train(
    recipe: RecipeArgument,
    model: NetworkArgument,
    out: Out,
    settings: Assignments = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    compile: Compile = False,
    fsdp: Fsdp = False,
    tensorboard: Board = False,
    ram: Ram = None,
    restart: Restart = False,
) -> None:
    """Train one model of a recipe. With torchrun, on several GPUs or machines."""
    with ranks_of_torchrun() as ranks:
        hardware = Hardware(device, threads, compile, fsdp, ranks)
        execution = Execution(hardware, ram=_bytes(ram), restart=restart, tensorboard=tensorboard)
        made = Run(_recipe(recipe, settings, bf16=bf16), out, execution).network(model)
        if ranks.is_first:
            typer.echo(json.dumps(made.facts, indent=2))


@app.command(name="remember")
def remember_(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|DIR", help="A recipe as for `run`, or the folder of a model with a memory."),
    ],
    settings: Assignments = None,
    out: Annotated[Path | None, typer.Option(help="With a recipe: folder of the run.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Files or folders to remember too; may be repeated.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    engine: OnEngine = "local",
    address: Address = None,
    restart: Restart = False,
) -> None:
    """Put a recipe's training text, or further texts, into a long-term memory; the next search finds them."""
    hardware = Hardware(device, threads)
    if is_attached(Path(recipe)):
        out = None
    elif out is None:
        raise InputError(f"--out is missing: where is the run of {recipe}?")
    with open_engine(engine, address, threads) as opened:
        execution = Execution(hardware, opened, restart=restart)
        if out is None:
            where = path_for(engine, Path(recipe))
            memory = remember_files(Attached(where, hardware), text or [], execution)
        else:
            run = Run(_recipe(recipe, settings, bf16=bf16), path_for(engine, out), execution)
            memory = run.remember(text or [])
    typer.echo(json.dumps(describe_memory(memory), indent=2, ensure_ascii=False))


@app.command()
def forget(
    memory: MemoryArgument,
    documents: Annotated[list[str], typer.Argument(help="Names of documents to forget.")],
    receipt: Annotated[
        bool,
        typer.Option("--receipt", help="Remove their bytes now, search every file for them, write what was done."),
    ] = False,
) -> None:
    """Forget documents: from now on no search finds anything of them. `compact` removes their bytes."""
    if receipt:
        for line in forget_with_receipt(memory, documents).lines():
            say(line)
        return
    say(f"{memory}: forgot {memory_at(memory).forget(documents):,} document(s)")


@app.command()
def compact(memory: MemoryArgument) -> None:
    """Remove what was forgotten from a memory and from the run or model around it, and join small shards."""
    removed, freed = remove_forgotten(memory)
    for each in removed:
        say(f"{each.path}: removed {each.what}")
    say(f"{memory}: freed {freed:,} bytes")


@app.command()
def verify(directory: Annotated[Path, typer.Argument(help="A run, a model with a memory, or a part of one.")]) -> None:
    """Read every byte of a directory and compare it with what was written; name what has no digest."""
    say(verify_directory(directory).summary())


@app.command()
def neighbours(
    recipe: RecipeArgument,
    out: Out,
    settings: Assignments = None,
    recall: Annotated[float | None, typer.Option(help="neighbours.recall: share of true neighbours to find.")] = None,
    ram: Ram = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    engine: OnEngine = "local",
    address: Address = None,
    restart: Restart = False,
) -> None:
    """Find the nearest entries of every training, dev and test position, once and for all."""
    wanted = [] if recall is None else [f"neighbours.recall={recall}"]
    chosen = _recipe(recipe, [*(settings or []), *wanted], bf16=bf16)
    with open_engine(engine, address, threads) as opened:
        execution = Execution(Hardware(device, threads), opened, _bytes(ram), restart)
        made = Run(chosen, path_for(engine, out), execution).neighbours
    typer.echo(json.dumps(made.facts, indent=2))


@app.command()
def index(
    memory: MemoryArgument,
    out: Annotated[Path, typer.Option(help="Folder for the index.")],
    kind: Annotated[
        IndexKind, typer.Option(help="exact, faiss, disk (for memories larger than RAM), scann (an extra).")
    ] = ("faiss"),
    recall: Annotated[float, typer.Option(help="Share of true neighbours to find.")] = 0.95,
    count: Annotated[int, typer.Option(help="Number of neighbours by which the recall is measured.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random samples.", min=0)] = 1,
    threads: Threads = None,
    engine: OnEngine = "local",
    address: Address = None,
) -> None:
    """Build an index of a memory for generation and serving, and measure its recall against exact search."""
    with open_engine(engine, address, threads) as opened:
        made = memory_at(path_for(engine, memory))
        settings = IndexSettings(kind, recall, count, seed)
        _, description = make_searcher(made, path_for(engine, out), settings, opened)
    typer.echo(json.dumps(description.as_json(), indent=2))


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
    execution = Execution(Hardware(device, threads), ram=_bytes(ram), restart=restart)
    run = Run(_recipe(recipe, settings, bf16=bf16), out, execution)
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
    fsdp: Fsdp = False,
    tensorboard: Board = False,
    ram: Ram = None,
    engine: OnEngine = "local",
    address: Address = None,
    restart: Restart = False,
) -> None:
    """Carry out a whole recipe: corpus, models, evaluation, table. Finished stages are skipped, killed ones resume."""
    with ranks_of_torchrun() as ranks:
        chosen, hardware = _recipe(recipe, settings, bf16=bf16), Hardware(device, threads, compile, fsdp, ranks)
        wanted = (engine, address) if ranks.is_first else ("local", None)  # other ranks only train
        with open_engine(*wanted, threads) as opened:
            execution = Execution(hardware, opened, _bytes(ram), restart, tensorboard)
            carry_out(Run(chosen, path_for(engine, out), execution), Console())


def _recipe(name: str, settings: list[str] | None, *, bf16: bool = False) -> Recipe:
    """Returns a recipe with the settings of the command line laid over it."""
    switches = ["training.bf16=true", "evaluation.bf16=true"] if bf16 else []
    return read_recipe(name, [*(settings or []), *switches])


def _bytes(ram: str | None) -> int | None:
    """Returns a size such as 64G in bytes."""
    return None if ram is None else parse_size(ram)
