"""A frozen, pretrained language model with its memory, as it lies on disk.

DIR/attached.json    which model it is attached to, and how it is read
DIR/model            the model, if it had to be converted
DIR/corpus           the texts: train, dev and test by document
DIR/memory           every position of the training documents; at the end of the others too
DIR/index            for live searches
DIR/combiner         the adaptive mixture, kNN-LM's setting, the policy of searching, and what they gained
"""

from functools import cached_property
from pathlib import Path

from spalm import artifact
from spalm.artifact import Artifact
from spalm.attachment.base import PretrainedBase
from spalm.attachment.policy import SearchPolicy
from spalm.attachment.settings import AttachSettings
from spalm.compute import Hardware
from spalm.corpus import Corpus
from spalm.errors import InputError
from spalm.lm.pretrained import PretrainedFolder
from spalm.memory import Memory
from spalm.semiparametric import (
    AdaptiveMixture,
    Combiner,
    Gate,
    GateCombiner,
    Knn,
    KnnCombiner,
    MixtureCombiner,
    PlainCombiner,
    Search,
    open_search,
)
from spalm.training import load_parameters

KIND = "attached combiner"
FILE = "attached.json"
MIXTURE, POLICY, GATE = "mixture.safetensors", "policy.safetensors", "gate.safetensors"


def is_attached(directory: Path) -> bool:
    return (directory / FILE).is_file()


class Attached:
    """A pretrained model with its memory, opened to be used."""

    def __init__(self, directory: Path | str, hardware: Hardware):
        self.directory = Path(directory)
        path = self.directory / FILE
        if not is_attached(self.directory):
            raise InputError(f"{self.directory} holds no model with a memory (no {FILE}); make one with `spalm attach`")
        about = artifact.read_json(path)
        self.settings = AttachSettings.parse(about["settings"], str(path))
        self.source: str = about["source"]
        """Name of the model when the memory was attached."""
        folder = PretrainedFolder(self.directory / about["model"])
        if not folder.path.is_dir():
            raise InputError(f"{folder.path}, the model of {self.directory}, is gone; put it back, or attach again")
        self.base = PretrainedBase(folder, about["digest"], hardware, self.settings.context, self.settings.stride)
        self.corpus = Corpus(self.directory / "corpus")
        self.memory = Memory(self.directory / "memory")
        self.combined = Artifact(self.directory / "combiner", KIND)

    @cached_property
    def search(self) -> Search:
        return open_search(self.memory, self.directory / "index", self.settings.neighbours)

    @cached_property
    def mixture(self) -> AdaptiveMixture:
        facts = self.combined.facts
        made = AdaptiveMixture(self.settings.adaptive, facts["width"], facts["neighbours"])
        load_parameters(made, self.combined.directory / MIXTURE)
        return made.eval().requires_grad_(False).to(self.base.device)

    @cached_property
    def policy(self) -> SearchPolicy:
        made = SearchPolicy(self.settings.policy, self.combined.facts["width"])
        load_parameters(made, self.combined.directory / POLICY)
        return made.eval().requires_grad_(False).to(self.base.device)

    @cached_property
    def gate(self) -> Gate:
        made = Gate(self.settings.gate, self.combined.facts["width"])
        load_parameters(made, self.combined.directory / GATE)
        return made.eval().requires_grad_(False).to(self.base.device)

    @property
    def combiner(self) -> Combiner:
        """The one that was request for."""
        return self.combiners[self.settings.combiner]

    @cached_property
    def combiners(self) -> dict[str, Combiner]:
        """All that there are, by their names in the figures."""
        found: dict[str, Combiner] = {
            "plain": PlainCombiner(),
            "knn-lm": KnnCombiner(PlainCombiner(), Knn(**self.combined.facts["knn"])),
            "adaptive": MixtureCombiner(PlainCombiner(), self.mixture),
        }
        return found | {"gate": GateCombiner(self.gate)} if self.settings.combiner == "gate" else found
