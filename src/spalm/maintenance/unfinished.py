"""Unfinished work in a directory: a stage or an index that was killed holds copies of what it was made from.

It is removed when documents are, because nothing says which part of it comes from them. Training is not: a checkpoint
is hours of work, and holds parameters and hidden states, no text.
"""

import shutil
from pathlib import Path

from spalm.artifact import MANIFEST, SCRATCH, UNFINISHED, only_writer, tidy
from spalm.files import child, read_json, remove_leftovers
from spalm.lm.training import KIND as MODEL_KIND
from spalm.maintenance.place import Place, Removed
from spalm.manifest import Identity
from spalm.memory.forgotten import drop_unfinished
from spalm.neighbours.index.build import DESCRIPTION, WORK, remove_index
from spalm.semiparametric.training import KIND as SPALM_KIND

_TRAINED = (MODEL_KIND, SPALM_KIND)
"""Kinds of stages that are trained."""


def remove_unfinished(place: Place) -> list[Removed]:
    """Removes the unfinished work of stages and indexes, but not that of training; returns what was removed."""
    removed = []
    for folder in [folder for folder in place.stages(UNFINISHED) if not _is_training(folder)]:
        with only_writer(folder):
            for path in folder.iterdir():
                if path.name != UNFINISHED:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            (folder / UNFINISHED).unlink()
        removed.append(Removed(folder, "the unfinished work of a stage; the same command begins it again"))
    for memory in place.other_memories():
        if drop_unfinished(memory):
            removed.append(Removed(memory.directory, "the unfinished part; the same command begins it again"))
    for folder in place.stages(MANIFEST):
        with only_writer(folder):
            scratch = (folder / SCRATCH).exists()
            tidy(folder)
            remove_leftovers(folder)
        if scratch:
            removed.append(Removed(folder, "scratch files"))
    works = [folder for folder in place.folders() if WORK.fullmatch(folder.name)]
    for folder in dict.fromkeys(work.parent for work in works):
        with only_writer(folder):
            if not (folder / DESCRIPTION).exists():  # killed while it was saved
                remove_index(folder)
            for work in [work for work in works if work.parent == folder]:
                shutil.rmtree(work)
        removed.append(Removed(folder, "the unfinished work of an index"))
    return removed


def unfinished_training(place: Place) -> list[Path]:
    """Returns the folders of training that is not finished, which stay."""
    return [folder for folder in place.stages(UNFINISHED) if _is_training(folder)]


def _is_training(folder: Path) -> bool:
    """Returns whether an unfinished stage is one that is trained."""
    begun: Identity = read_json(child(folder, UNFINISHED), Identity, remedy=f"remove {folder} and begin again")
    return begun.kind in _TRAINED
