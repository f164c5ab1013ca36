"""A frozen, pretrained language model with its memory, on disk.

DIR/attached.json    which model the memory is attached to, and the settings
DIR/model            the model, if it had to be converted
DIR/corpus           the texts: train, dev and test by document
DIR/memory           every position of the training documents and, once the figures are measured, of dev and test
DIR/index            the index for live searches, where the memory has keys
DIR/combiner         the adaptive mixture, kNN-LM's setting, the search policy, and what they gained
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from torch import nn

from spalm.artifact import Artifact
from spalm.attachment.base import PretrainedBase
from spalm.attachment.search_policy import SearchPolicy
from spalm.attachment.settings import AttachSettings
from spalm.compute import Hardware
from spalm.corpus import Corpus
from spalm.digests import KNOWN, KnownDigests, refuse_changed, updating_sums
from spalm.errors import DamagedError, InputError
from spalm.files import child, is_inside, read_json, write_json
from spalm.lm.pretrained import Backend, PretrainedFolder
from spalm.manifest import Count, Digest, Size
from spalm.memory import Encoder, Memory
from spalm.semiparametric import (
    AdaptiveMixture,
    Combiner,
    Gate,
    GateCombiner,
    Knn,
    KnnCombiner,
    MemorySearch,
    MixtureCombiner,
    PlainCombiner,
    Search,
    open_search,
)
from spalm.training import load_network

ModuleType = TypeVar("ModuleType", bound=nn.Module)
COMBINER_KIND = "attached combiner"
"""Kind of the artifact that holds the fitted combiner."""
ATTACHED_FILE = "attached.json"
"""File that marks the folder of a model with a memory."""
MIXTURE_FILE, POLICY_FILE, GATE_FILE = "mixture.safetensors", "policy.safetensors", "gate.safetensors"
"""Parameters of the fitted combiner."""


_AGAIN = "restore it from a copy, attach again or, if you changed it yourself, remove SHA256SUMS beside it"
"""Remedy of a damaged file."""


def _read(directory: Path) -> "_Description":
    """Reads the file that marks the folder."""
    refuse_changed(directory, [ATTACHED_FILE], _AGAIN)
    return read_json(child(directory, ATTACHED_FILE), _Description, remedy=_AGAIN)


def read_description(directory: Path) -> tuple[Path, str]:
    """Returns the folder of the base model of an attached folder, and its digest when the memory was attached."""
    description = _read(directory)
    return base_folder(directory, description.model), description.digest


def base_folder(directory: Path, place: str) -> Path:
    """Returns the folder of the base model, given as an absolute path or as one within `directory`."""
    path = directory / place
    if not Path(place).is_absolute() and not is_inside(path, directory):
        raise DamagedError(f"{directory / ATTACHED_FILE} names a model outside of the folder, {place!r}; {_AGAIN}")
    return path


def set_base(directory: Path, folder: PretrainedFolder) -> None:
    """Notes in an attached folder where its base model lies; refuses a model to which it was not attached."""
    if _read(directory).digest not in folder.digests():
        raise InputError(
            f"{folder.path} is not the model that the memory was made with, and keys of another model cannot be "
            "compared; give the one that it was"
        )
    content = read_json(child(directory, ATTACHED_FILE), dict[str, Any], remedy=_AGAIN)
    with updating_sums(directory, [ATTACHED_FILE]):
        write_json(directory / ATTACHED_FILE, {**content, "model": str(folder.path.resolve())})


def is_attached(directory: Path) -> bool:
    """Returns whether a folder holds a pretrained model with a memory."""
    return (directory / ATTACHED_FILE).is_file()


class _Description(BaseModel):
    """The form of the file that marks the folder."""

    source: str
    model: str
    digest: Digest
    settings: dict[str, Any]
    revision: str | None = None
    keys_by: Backend = Backend()
    """Directories that earlier versions made do not say it."""


class _CombinerFacts(BaseModel):
    """The form of the facts about a fitted combiner."""

    neighbours: Count
    width: Size
    levels: Count = 0
    figures: dict[str, dict[str, float]]
    documents: dict[str, dict[str, list[float]]] = {}
    """Sums of log p by document; earlier versions did not keep them."""
    curve: list[dict[str, float]]
    threshold: float | None = None
    knn: Knn | None = None


class Attached:
    """A pretrained model with its memory, opened for use."""

    def __init__(self, directory: Path | str, hardware: Hardware):
        self.directory = Path(directory)
        path = self.directory / ATTACHED_FILE
        if not is_attached(self.directory):
            raise InputError(
                f"{self.directory} holds no model with a memory (no {ATTACHED_FILE}); make one with `spalm attach`"
            )
        description = _read(self.directory)
        self.settings = AttachSettings.parse(description.settings, str(path))
        self.source = description.source
        """Name of the model when the memory was attached."""
        folder = PretrainedFolder(base_folder(self.directory, description.model))
        if not folder.path.is_dir():
            revision = f" (revision {description.revision} of {self.source})" if description.revision else ""
            raise InputError(
                f"{folder.path}, the model of {self.directory}{revision}, is gone; put it back, or attach again"
            )
        if description.digest not in folder.digests(KnownDigests(self.directory / KNOWN).of):
            raise InputError(
                f"{folder.path} is not the model that {self.directory} was made with: its files have changed, and keys "
                "of another model cannot be compared; put it back, or attach again"
            )
        reading = self.settings.context, self.settings.stride
        self.base = PretrainedBase(folder, description.digest, hardware, *reading, description.keys_by)
        self.corpus = Corpus(self.directory / "corpus")
        self.memory = Memory(self.directory / "memory")
        self.combiner_artifact = Artifact(self.directory / "combiner", COMBINER_KIND, _CombinerFacts)
        """The fitted combiner; its facts are kNN-LM's setting, the policy's threshold, and the figures."""

    @property
    def has_keys(self) -> bool:
        """Whether nearest contexts are a source of the memory."""
        return self.settings.memory != "exact"

    @property
    def encoder_of_documents(self) -> Encoder | None:
        """Makes the keys of documents that are added; None: they get no keys."""
        return self.base.encoder if self.has_keys else None

    @cached_property
    def search(self) -> Search:
        """Live search of the memory for nearest contexts."""
        return open_search(self.memory, self.directory / "index", self.settings.neighbours)

    @property
    def memory_search(self) -> MemorySearch:
        """Search of all sources that the mixture weighs, in the memory as it is now."""
        exact = self.memory.exact.current() if self.mixture.levels else None
        return MemorySearch(self.memory, self.search if self.has_keys else None, exact)

    @cached_property
    def mixture(self) -> AdaptiveMixture:
        """The fitted adaptive mixture."""
        settings, facts = self.settings.adaptive, self.combiner_artifact.facts
        return self._load(
            lambda: AdaptiveMixture(settings, facts["width"], facts["neighbours"], levels=facts.get("levels", 0)),
            MIXTURE_FILE,
        )

    @cached_property
    def policy(self) -> SearchPolicy:
        """The fitted search policy."""
        return self._load(
            lambda: SearchPolicy(self.settings.policy, self.combiner_artifact.facts["width"]), POLICY_FILE
        )

    @cached_property
    def gate(self) -> Gate:
        """The trained gate, if it was asked for when the memory was attached."""
        return self._load(lambda: Gate(self.settings.gate, self.combiner_artifact.facts["width"]), GATE_FILE)

    def _load(self, make: Callable[[], ModuleType], file: str) -> ModuleType:
        """Returns a part of the combiner with its parameters, frozen."""
        module = load_network(make, self.combiner_artifact.directory / file)
        return module.eval().requires_grad_(requires_grad=False).to(self.base.device)

    @property
    def combiner(self) -> Combiner:
        """The combiner that was chosen in the settings."""
        return self.combiners[self.settings.combiner]

    @cached_property
    def combiners(self) -> dict[str, Combiner]:
        """All combiners that were fitted, by their names in the figures."""
        found: dict[str, Combiner] = {"plain": PlainCombiner()}
        if self.has_keys:
            found["knn-lm"] = KnnCombiner(PlainCombiner(), Knn(**self.combiner_artifact.facts["knn"]))
        found["adaptive"] = MixtureCombiner(PlainCombiner(), self.mixture)
        if self.settings.combiner == "gate":
            found["gate"] = GateCombiner(self.gate)
        return found
