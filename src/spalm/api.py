"""The Python API: what `import spalm` offers to notebooks and programs. The command line calls the same functions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spalm.attachment import Attached, AttachSettings
from spalm.attachment import attach as attach_memory
from spalm.compute import Execution
from spalm.generation import AttachedModels, Model, load_model, model_of
from spalm.generation.hugging_face import export_for_transformers
from spalm.generation.memories import MemoryFolders
from spalm.paths import user_path
from spalm.runs import FinishedRun, HeldOut, Recipe, RowName, Run, print_results, read_recipe
from spalm.settings import read_settings
from spalm.study import Analysis, find_analysis, make_request, write_report

Location = str | Path
"""Path of a file or folder; for a pretrained model also its name on the Hugging Face hub."""


def attach(
    model: Location,
    texts: Sequence[Location],
    out: Location,
    *,
    set: Mapping[str, Any] | None = None,
    execution: Execution | None = None,
) -> Model:
    """Gives a pretrained model a memory of texts, and returns it ready to use.

    Args:
        model: Folder of a causal LM, its name on the Hugging Face hub, or a .gguf file.
        texts: Files and folders of text.
        out: Folder to make. A killed run is continued there; a finished one is opened.
        set: Settings by name, such as `{"search": 0.3}`; `spalm settings attach` lists them.
        execution: Device, threads, engine; default: this machine.
    """
    settings = read_settings(AttachSettings, assignments(set))
    attached = attach_and_export(
        str(model), [Path(text) for text in texts], Path(out), settings=settings, execution=execution
    )
    return model_of(AttachedModels(attached))


def attach_and_export(
    model: str, texts: list[Path], out: Path, *, settings: AttachSettings, execution: Execution | None = None
) -> Attached:
    """Attaches a memory, and writes the files by which transformers opens the folder."""
    attached = attach_memory(model, texts, user_path(out), settings=settings, execution=execution or Execution())
    export_for_transformers(attached)
    return attached


def load(
    directory: Location,
    model: str | None = None,
    *,
    memories: MemoryFolders = (),
    execution: Execution | None = None,
) -> Model:
    """Opens a model with its memory.

    Args:
        directory: What `attach` made, or the folder of a finished run.
        model: Which of a run's models; default: the last of its table, `adaptive`.
        memories: Folders of further memories that were attached to the same base model, each also as NAME=FOLDER, or
            folders by name. Without a name a memory has that of its folder.
        execution: Device and threads; default: this machine.
    """
    return load_model(user_path(directory), (execution or Execution()).hardware, model, memories=memories)


def run(
    recipe: str | Recipe,
    out: Location,
    *,
    set: Mapping[str, Any] | None = None,
    execution: Execution | None = None,
) -> "CompletedRun":
    """Carries out a whole recipe: corpus, networks, memory, neighbours, evaluation, results.

    Finished stages are skipped, killed ones resume.

    Args:
        recipe: Name of a recipe, the path of a .yaml file, or a `Recipe`.
        out: Folder of the run; each stage is a folder below it.
        set: Settings laid over the recipe, such as `{"training.steps": 500}`.
        execution: Device, threads, engine, RAM; default: this machine.
    """
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, assignments(set))
    made = Run(chosen, user_path(out), execution or Execution())
    carry_out(made, Console(quiet=True))
    return CompletedRun(made.directory)


def carry_out(run: Run, console: Console) -> None:
    """Carries out all stages of a run, and writes the files by which transformers opens the folder."""
    run.everything(console)
    if run.execution.hardware.ranks.is_first:
        export_for_transformers(FinishedRun(run.directory))


class CompletedRun(FinishedRun):
    """A finished run: its `results`, and methods that analyse, report or load it. Printing it shows the table."""

    def study(self, name: str, *, split: HeldOut = "test", model: RowName = "spalm") -> Analysis:
        """Returns one of the analyses, such as "gates": its tables, its caption, and `picture()` as a figure."""
        return find_analysis(name)(make_request(self, split, model))

    def report(self, out: Location | None = None) -> Path:
        """Writes the run as one HTML page and returns its path; default: RUN/report/report.html."""
        return write_report(self, None if out is None else Path(out))

    def load(self, model: RowName | None = None, *, execution: Execution | None = None) -> Model:
        """Opens one of the run's models; default: the last of its table, `adaptive`."""
        return load(self.directory, model, execution=execution)

    def __str__(self) -> str:
        console = Console(width=110)
        with console.capture() as captured:
            print_results(self.results, self.title, self.recipe.paper, console=console)
        return captured.get()


def register_with_transformers() -> None:
    """Lets AutoConfig and AutoModelForCausalLM of transformers open folders of models with a memory."""
    from spalm.generation.hugging_face.model import register_with_transformers as register

    register()


def assignments(settings: Mapping[str, Any] | None) -> list[str]:
    """Returns settings by name in the form of the command line, `key=value`."""
    return [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
