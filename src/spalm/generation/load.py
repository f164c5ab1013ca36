"""Opening models on disk: what `spalm attach` made, or one of the models of a finished run."""

from pathlib import Path

from spalm.attachment import Attached, is_attached
from spalm.compute import Hardware
from spalm.errors import InputError
from spalm.generation.memories import MemoryFolders
from spalm.generation.model import Model
from spalm.generation.models import AttachedModels, ModelSet, RunModels
from spalm.runs import RESULTS, FinishedRun


def open_models(directory: Path | str, hardware: Hardware) -> ModelSet:
    """Opens the models of a directory; their networks are loaded when they are first used."""
    directory = Path(directory)
    if is_attached(directory):
        return AttachedModels(Attached(directory, hardware))
    if (directory / RESULTS).is_file():
        return RunModels(FinishedRun(directory), hardware)
    if not directory.exists():
        raise InputError(f"there is no folder {directory}; give one that `spalm attach` or `spalm run` made")
    raise InputError(
        f"{directory} holds no model with a memory; make one with `spalm attach MODEL TEXT... --out {directory}`"
    )


def load_model(
    directory: Path | str, hardware: Hardware, variant: str | None = None, *, memories: MemoryFolders = ()
) -> Model:
    """Opens what `spalm attach` made, or one of the models of a finished run: its default row if none is named.

    `memories` are the folders of further memories of the same base model; see `MemoryFolders`.
    """
    models = open_models(directory, hardware)
    if variant is not None and isinstance(models, AttachedModels):
        raise InputError(f"--model {variant}: {directory} is one model with its memory; leave it out")
    models.open_memories(memories)
    return model_of(models, variant)


def model_of(models: ModelSet, variant: str | None = None) -> Model:
    """Returns one of the models of an open directory; the default one if none is named."""
    chosen = models.variant(models.known(variant))
    return Model(models.model_name(chosen.name), models, chosen, models.policy, models.threshold)
