"""The command line: verbs in the order of the pipeline, each calling one function."""

import errno
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spalm.artifact import Artifact
from spalm.console import console
from spalm.corpus import OFFICIAL, download
from spalm.errors import InputError
from spalm.learning import Hardware
from spalm.recipe import MODELS, ModelName, Run, read_recipe
from spalm.study import print_results

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, rich_markup_mode=None)

RecipeArgument = Annotated[str, typer.Argument(help="Name of a recipe, or the path of a .yaml file.")]
ModelArgument = Annotated[ModelName, typer.Argument(help=f"One of {', '.join(MODELS)}.")]
Assignments = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the recipe.")
]
Out = Annotated[Path, typer.Option(help="Folder of the run; each stage is a folder below it.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: all cores.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 where it is safe (for GPUs).")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the training step (for GPUs).")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Log to TensorBoard too (needs the extra).")]
Restart = Annotated[bool, typer.Option("--restart", help="Throw away unfinished work that had other settings.")]


@app.command(name="download")
def download_(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(OFFICIAL)}.")],
    to: Annotated[Path, typer.Option(help="Folder to put it in.")] = Path("data"),
) -> None:
    """Fetch an official corpus, check its digest, unpack it; resumes if interrupted."""
    console.print(f"{download(name, to)} is ready; use it with SPALM_DATA={to}")


@app.command()
def corpus(recipe: RecipeArgument, out: Out, settings: Assignments = None, restart: Restart = False) -> None:
    """Turn a recipe's text into token arrays."""
    made = Run(read_recipe(recipe, settings or []), out, Hardware(), restart=restart).corpus
    console.print(made.facts)


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
    restart: Restart = False,
) -> None:
    """Train one model of a recipe."""
    hardware = Hardware(device, threads, bf16, compile)
    console.print(Run(read_recipe(recipe, settings or []), out, hardware, tensorboard, restart).model(model).facts)


@app.command()
def evaluate(
    recipe: RecipeArgument,
    model: ModelArgument,
    out: Out,
    settings: Assignments = None,
    device: Device = "auto",
    threads: Threads = None,
    bf16: Bf16 = False,
    restart: Restart = False,
) -> None:
    """Score dev and test with one model of a recipe, keeping every token's log-probability."""
    run = Run(read_recipe(recipe, settings or []), out, Hardware(device, threads, bf16), restart=restart)
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
    restart: Restart = False,
) -> None:
    """Carry out a whole recipe: corpus, models, evaluation, table. Finished stages are skipped, killed ones resume."""
    hardware = Hardware(device, threads, bf16, compile)
    Run(read_recipe(recipe, settings or []), out, hardware, tensorboard, restart).everything(Console())


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="A finished stage.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
) -> None:
    """Print what an artifact says of itself."""
    opened = Artifact(directory)
    if verify:
        opened.verify()
    typer.echo(json.dumps(opened.manifest, indent=2, ensure_ascii=False))


def main() -> None:
    """The `spalm` command: what a user can mend is told in one line, without a traceback."""
    try:
        app()
    except InputError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("stopped; run the same command again to go on from here")
    except OSError as error:
        _fail(_explain(error))


def _explain(error: OSError) -> str:
    where = error.filename or "the output folder"
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in reason:
        return f"no space left to write {where}; make room or choose another --out, then run the same command to go on"
    return f"{where}: {reason}"


def _fail(message: str) -> None:
    console.print(f"[bold red]spalm:[/bold red] {message}", soft_wrap=True, highlight=False)
    sys.exit(1)
