"""Further memories beside that of a model's own directory: opened, and refused unless their keys can be compared."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from spalm.attachment import Attached, is_attached
from spalm.corpus import Tokeniser
from spalm.digests import KNOWN, KnownDigests
from spalm.errors import InputError
from spalm.generation.memories.usable import UsableMemory
from spalm.generation.passages.ranking import PassageIndex
from spalm.generation.trace import MEMORY_FOLDER, folder_around
from spalm.memory import Encoder, Memory
from spalm.semiparametric import Search, open_search

if TYPE_CHECKING:
    from spalm.generation.models.attached_models import AttachedModels


@dataclass(frozen=True)
class AddedMemory(UsableMemory):
    """A further memory of a base model."""

    memory: Memory
    directory: Path | None
    """The folder that `spalm attach` made, with room for an index; None: it is a memory alone."""
    models: "AttachedModels"
    """The model beside which the memory is open."""

    @property
    def tokeniser(self) -> Tokeniser:
        """Turns text into tokens and back: the base model's."""
        return self.models.tokeniser

    @cached_property
    def search(self) -> Search:
        """Live search, for as many neighbours as the model's own memory is searched for."""
        folder = Path(self._index_in_use.name) if self.directory is None else self.directory / "index"
        return open_search(self.memory, folder, self.models.attached.settings.neighbours)

    @cached_property
    def _index_in_use(self) -> "TemporaryDirectory[str]":
        """Folder of the index of a memory alone, removed when the program ends: nobody would compact it."""
        return TemporaryDirectory(prefix="spalm-index-")

    @cached_property
    def passages(self) -> PassageIndex:
        """The paragraphs of the memory, ranked with the settings of the model's own."""
        return PassageIndex(self.memory, self.tokeniser, self.models.bm25)

    @property
    def encoder_of_documents(self) -> Encoder | None:
        """Makes the keys of documents that are added, by reading as the memory was read; None: they get no keys."""
        if not self.memory.written_keys():
            return None
        own, reading = self.models.encoder, self.memory.identity["reading"]
        windows = replace(own.reading, segment=reading["segment"], stride=reading["stride"])
        return replace(own, digest=self.memory.identity["encoder"]["digest"], reading=windows)


def open_added_memory(folder: Path, models: "AttachedModels") -> AddedMemory:
    """Opens a memory that was attached to the same base model, or unpacked for it; its base model need not be there.

    `folder` is what `spalm attach` made or `spalm unpack` wrote, or the folder of the memory in it.
    """
    around = folder_around(folder)
    memory = Memory(folder if around is None else around / MEMORY_FOLDER)
    if around is not None and not is_attached(around):
        raise InputError(f"{folder} is a run, whose memory is of another model; give what `spalm attach` made")
    _refuse_other_keys(folder, memory, models.attached)
    return AddedMemory(memory, around, models)


def _refuse_other_keys(folder: Path, memory: Memory, attached: Attached) -> None:
    """Refuses a memory whose tokens or keys are not those of the model's own memory."""
    own, other = attached.memory.identity["encoder"], memory.identity["encoder"]
    same = {name: other[name] for name in ("width", "vocabulary")} == {
        name: own[name] for name in ("width", "vocabulary")
    }
    if not same or other["digest"] not in _digests_of(attached):
        raise InputError(
            f"{folder} is a memory of another model than {attached.directory}, and keys of another model cannot be "
            "compared; give one that was attached to the same model"
        )
    if memory.width != attached.memory.width or not _is_read_in_windows(memory.identity["reading"]):
        raise InputError(f"{folder} has keys of another kind than {attached.directory}; attach its texts again")


def _digests_of(attached: Attached) -> set[str]:
    """Returns the digests by which memories name the base model."""
    base = attached.base
    return {base.digest, *base.folder.digests(KnownDigests(attached.directory / KNOWN).of)}


def _is_read_in_windows(reading: dict[str, Any]) -> bool:
    """Returns whether a memory was read as pretrained models read: in windows of each document."""
    segment, stride = reading.get("segment"), reading.get("stride")
    return (
        isinstance(segment, int)
        and isinstance(stride, int)
        and 0 < stride <= segment
        and reading.get("memory") == 0
        and reading.get("by_document") is True
    )
