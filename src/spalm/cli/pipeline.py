"""Verbs of the pipeline, from text to results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spalm.choices import CORPORA, LARGEST, IndexKind
from spalm.cli.application import app
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
    given_path,
    memory_at,
    path_for,
)
from spalm.console import Console, print_json, say
from spalm.errors import InputError

if TYPE_CHECKING:
    from spalm.runs import Recipe


@app.command(name="download")
def download_(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(CORPORA)}.")],
    to: Annotated[Path, typer.Option(parser=given_path, help="Folder to put it in.")] = Path("data"),
) -> None:
    """Fetch an official corpus, check its digest, unpack it; resumes if interrupted."""
    from spalm.corpus import download_corpus

    say(f"{download_corpus(name, to)} is ready; use it with SPALM_DATA={to}")


@app.command()
def corpus(recipe: RecipeArgument, out: Out, settings: Assignments = None, restart: Restart = False) -> None:
    """Turn a recipe's text into token arrays."""
    from spalm.compute import Execution
    from spalm.runs import Run

    made = Run(_recipe(recipe, settings), out, Execution(restart=restart)).corpus
    print_json(made.facts)


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
    from spalm.compute import Execution, Hardware, ranks_of_torchrun
    from spalm.runs import Run

    with ranks_of_torchrun() as ranks:
        hardware = Hardware(device, threads, compile, fsdp, ranks)
        execution = Execution(hardware, ram=_bytes(ram), restart=restart, tensorboard=tensorboard)
        made = Run(_recipe(recipe, settings, bf16=bf16), out, execution).network(model)
        if ranks.is_first:
            print_json(made.facts)


@app.command(name="remember")
def remember_(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|DIR", help="A recipe as for `run`, or the folder of a model with a memory."),
    ],
    settings: Assignments = None,
    out: Annotated[Path | None, typer.Option(parser=given_path, help="With a recipe: folder of the run.")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(parser=given_path, help="Files or folders to remember too; may be repeated.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    engine: OnEngine = "local",
    address: Address = None,
    restart: Restart = False,
) -> None:
    """Put a recipe's training text, or further texts, into a long-term memory; the next search finds them."""
    from spalm.attachment import Attached, is_attached, remember_files
    from spalm.compute import Execution, Hardware, open_engine
    from spalm.memory import describe_memory
    from spalm.runs import Run

    hardware, attached = Hardware(device, threads), is_attached(Path(recipe))
    for_recipes = {"--out": out, "KEY=VALUE": settings, "--bf16": bf16}
    unused = [name for name, value in for_recipes.items() if value] if attached else []
    if unused:
        raise InputError(f"{unused[0]} belongs to a recipe, and {recipe} is a model with a memory; leave it out")
    with open_engine(engine, address, threads) as opened:
        execution = Execution(hardware, opened, restart=restart)
        if attached:
            where = path_for(engine, Path(recipe))
            memory = remember_files(Attached(where, hardware), text or [], execution)
        elif out is None:
            raise InputError(f"--out is missing: where is the run of {recipe}?")
        else:
            run = Run(_recipe(recipe, settings, bf16=bf16), path_for(engine, out), execution)
            memory = run.remember(text or [])
    print_json(describe_memory(memory))


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
    names = list(dict.fromkeys(documents))
    if receipt:
        from spalm.maintenance import forget_with_receipt

        for line in forget_with_receipt(memory, names).lines():
            say(line)
        return
    say(f"{memory}: forgot {memory_at(memory).forget(names):,} document(s)")


@app.command()
def compact(memory: MemoryArgument) -> None:
    """Remove what was forgotten from a memory and from the run or model around it, and join small shards."""
    from spalm.maintenance import remove_forgotten

    removed, freed = remove_forgotten(memory)
    for each in removed:
        say(f"{each.path}: removed {each.what}")
    say(f"{memory}: freed {freed:,} bytes")


@app.command()
def verify(
    directory: Annotated[
        Path, typer.Argument(parser=given_path, help="A run, a model with a memory, or a part of one.")
    ],
) -> None:
    """Read every byte of a directory and compare it with what was written; name what has no digest."""
    from spalm.maintenance import verify_directory

    say(verify_directory(directory).summary())


@app.command(name="pack")
def pack_(
    directory: Annotated[
        Path, typer.Argument(parser=given_path, metavar="DIR", help="What `spalm attach` made, or a memory.")
    ],
    file: Annotated[Path, typer.Argument(parser=given_path, metavar="FILE", help="File to write.")],
    with_model: Annotated[
        bool, typer.Option("--with-model", help="Pack the copy of the base model that lies in DIR too.")
    ] = False,
) -> None:
    """Write a memory, or a model with a memory, into one file; the same content gives the same bytes."""
    from spalm.maintenance import pack

    packed = pack(directory, file, with_model=with_model)
    say(f"{file}: {packed.files:,} files of {directory}, {packed.size:,} bytes")


@app.command(name="unpack")
def unpack_(
    file: Annotated[Path, typer.Argument(parser=given_path, metavar="FILE", help="File that `spalm pack` wrote.")],
    directory: Annotated[Path, typer.Argument(parser=given_path, metavar="DIR", help="New folder to make.")],
    model: Annotated[
        Path | None,
        typer.Option(
            parser=given_path, help="Folder of the base model, if it lies elsewhere than where it was packed."
        ),
    ] = None,
) -> None:
    """Make a new folder of what `pack` wrote; every file is checked before the folder gets its name."""
    from spalm.maintenance import unpack

    missing = unpack(file, directory, model=model)
    say(f"{directory}: every file is as it was packed")
    if missing is not None:
        say(f"its base model is not there, and was at {missing}; unpack with --model FOLDER, or put it there")


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
    from spalm.compute import Execution, Hardware, open_engine
    from spalm.runs import Run

    wanted = [] if recall is None else [f"neighbours.recall={recall}"]
    chosen = _recipe(recipe, [*(settings or []), *wanted], bf16=bf16)
    with open_engine(engine, address, threads) as opened:
        execution = Execution(Hardware(device, threads), opened, _bytes(ram), restart)
        made = Run(chosen, path_for(engine, out), execution).neighbours
    print_json(made.facts)


@app.command()
def index(
    memory: MemoryArgument,
    out: Annotated[Path, typer.Option(parser=given_path, help="Folder for the index.")],
    kind: Annotated[
        IndexKind, typer.Option(help="exact, faiss, disk (for memories larger than RAM), scann (an extra).")
    ] = ("faiss"),
    recall: Annotated[float, typer.Option(help="Share of true neighbours to find.")] = 0.95,
    count: Annotated[
        int, typer.Option(help="Number of neighbours by which the recall is measured.", min=1, max=LARGEST)
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random samples.", min=0)] = 1,
    threads: Threads = None,
    engine: OnEngine = "local",
    address: Address = None,
) -> None:
    """Build an index of a memory for generation and serving, and measure its recall against exact search."""
    from spalm.compute import open_engine
    from spalm.neighbours import IndexSettings, make_searcher

    settings = IndexSettings.parse({"kind": kind, "recall": recall, "neighbours": count, "seed": seed}, "index")
    with open_engine(engine, address, threads) as opened:
        made = memory_at(path_for(engine, memory))
        _, description = make_searcher(made, path_for(engine, out), settings, engine=opened)
    print_json(description.as_json())


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
    from spalm.compute import Execution, Hardware
    from spalm.runs import Run, print_results

    execution = Execution(Hardware(device, threads), ram=_bytes(ram), restart=restart)
    run = Run(_recipe(recipe, settings, bf16=bf16), out, execution)
    print_results(run.rows(model), run.recipe.title, [], console=Console())


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
    from spalm.api import carry_out
    from spalm.compute import Execution, Hardware, open_engine, ranks_of_torchrun
    from spalm.runs import Run

    with ranks_of_torchrun() as ranks:
        chosen, hardware = _recipe(recipe, settings, bf16=bf16), Hardware(device, threads, compile, fsdp, ranks)
        wanted = (engine, address) if ranks.is_first else ("local", None)  # other ranks only train
        with open_engine(*wanted, threads) as opened:
            execution = Execution(hardware, opened, _bytes(ram), restart, tensorboard)
            carry_out(Run(chosen, path_for(engine, out), execution), Console())


def _recipe(name: str, settings: list[str] | None, *, bf16: bool = False) -> "Recipe":
    """Returns a recipe with the settings of the command line laid over it."""
    from spalm.runs import read_recipe

    switches = ["training.bf16=true", "evaluation.bf16=true"] if bf16 else []
    return read_recipe(name, [*(settings or []), *switches])


def _bytes(ram: str | None) -> int | None:
    """Returns a size such as 64G in bytes."""
    from spalm.compute import parse_size

    return None if ram is None else parse_size(ram)
