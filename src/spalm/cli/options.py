"""Arguments and options that several verbs share, and what they stand for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from spalm.choices import BackendName, EngineName, NetworkName, PrecisionName, RowName

if TYPE_CHECKING:
    from spalm.memory import Memory


def given_path(value: Path | str) -> Path:
    """Returns the path that was given; an empty one, often a variable that is not set, is not the current folder."""
    if not str(value):
        raise typer.BadParameter("the path is empty; give . for the current folder")
    return Path(value)


RecipeArgument = Annotated[str, typer.Argument(help="Name of a recipe, or the path of a .yaml file.")]
MemoryArgument = Annotated[
    Path,
    typer.Argument(
        parser=given_path, metavar="MEMORY", help="Folder of a memory, of a run, or of a model with a memory."
    ),
]
RunArgument = Annotated[Path, typer.Argument(parser=given_path, metavar="DIR", help="Folder of a finished run.")]
NetworkArgument = Annotated[
    NetworkName, typer.Argument(metavar="MODEL", help=f"One of {', '.join(get_args(NetworkName))}.")
]
RowArgument = Annotated[RowName, typer.Argument(help=f"One of {', '.join(get_args(RowName))}.")]
Assignments = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the recipe.")
]
Out = Annotated[Path, typer.Option(parser=given_path, help="Folder of the run; each stage is a folder below it.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Backend = Annotated[
    BackendName,
    typer.Option(
        help="What runs a pretrained model: torch, or llama.cpp if it came as a GGUF file; auto: the fastest."
    ),
]
Precision = Annotated[
    PrecisionName,
    typer.Option(help="Precision of a pretrained model in torch; auto: bfloat16 on a CPU that computes with it."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="CPU threads; default: all cores, in training divided among torchrun's ranks. With --engine ray: cores of "
        "each task that makes keys; default: those of the smallest machine.",
    ),
]
Bf16 = Annotated[bool, typer.Option("--bf16", help="training.bf16=true evaluation.bf16=true.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the training step (for GPUs).")]
Fsdp = Annotated[
    bool, typer.Option("--fsdp", help="Divide parameters and optimiser among torchrun's ranks, for large models.")
]
Board = Annotated[bool, typer.Option("--tensorboard", help="Log to TensorBoard too (needs the extra).")]
Ram = Annotated[
    str | None,
    typer.Option(
        help="RAM that the search for neighbours may use on a machine, such as 64G; fewer cores are used if there is "
        "not 512M for each; default: half of this machine's."
    ),
]
OnEngine = Annotated[
    EngineName, typer.Option("--engine", help="local, or ray (an extra): makes keys and neighbours on many machines.")
]
Address = Annotated[
    str | None,
    typer.Option(help="With --engine ray: host:port of a cluster, or auto; default: one started here."),
]
Restart = Annotated[bool, typer.Option("--restart", help="Begin unfinished stages again from scratch.")]
Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on; any but loopback gives other machines access and needs --key or --no-key."
    ),
]
NoKey = Annotated[bool, typer.Option("--no-key", help="Let other machines in without a key.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(help="A further host name by which clients may reach the server, such as a reverse proxy's."),
]
Memories = Annotated[
    list[str] | None,
    typer.Option(
        "--memory",
        metavar="[NAME=]DIR",
        help="A further memory that was attached to the same model, searched too; may be repeated.",
    ),
]
Port = Annotated[int, typer.Option(help="Port; 0: any that is free.", min=0, max=65535)]
PORT = 8765
"""Default port of the server and the explorer."""


def holds_memory(directory: Path) -> bool:
    """Returns whether a folder is a memory or has one inside."""
    from spalm.memory import is_memory

    return is_memory(directory) or is_memory(directory / "memory")


def memory_at(directory: Path) -> "Memory":
    """Opens the memory at a folder, or the one inside it."""
    from spalm.memory import Memory, is_memory

    inside = directory / "memory"
    return Memory(inside if is_memory(inside) else directory)


def path_for(engine: EngineName, out: Path) -> Path:
    """Returns a path that an engine's workers can use: an absolute one for a cluster, whose workers run elsewhere."""
    return out if engine == "local" else out.absolute()
