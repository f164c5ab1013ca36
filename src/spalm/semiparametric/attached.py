"""A frozen, pretrained language model with its memory, as it lies on disk.

DIR/attached.json    which model it is attached to, and how it is read
DIR/model            the model, if it had to be converted
DIR/corpus           the texts: train, dev and test by document
DIR/memory           every position of the training documents; at the end of the others too
DIR/index            for live searches
DIR/combiner         the adaptive mixture, kNN-LM's setting, the policy of searching, and what they gained
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from spalm import artifact
from spalm.artifact import Artifact
from spalm.console import bar
from spalm.corpus import Corpus, TokenStream
from spalm.engine import Travelling
from spalm.errors import InputError
from spalm.learning import Hardware, load_parameters
from spalm.lm import Reading
from spalm.lm.pretrained import Pretrained, PretrainedFolder
from spalm.memory import Encoder, Memory
from spalm.semiparametric.adaptive import AdaptiveMixture, AdaptiveSettings
from spalm.semiparametric.combiner import Combiner, Plain, ThroughGate, WithKnn, WithMixture
from spalm.semiparametric.frozen_gate import GateTraining
from spalm.semiparametric.gate import Gate, GateSettings
from spalm.semiparametric.knn import Knn, KnnSettings
from spalm.semiparametric.policy import PolicySettings, SearchPolicy
from spalm.semiparametric.searching import Search, open_search
from spalm.settings import Settings

KIND = "attached combiner"
FILE = "attached.json"
MIXTURE, POLICY, GATE = "mixture.safetensors", "policy.safetensors", "gate.safetensors"
_SAFE = 1 << 13
"""Entries after which a slow model's keys are put on disk."""


class AttachSettings(Settings):
    context: int = Field(1024, gt=1)
    """Tokens that the model reads at once, at most as many as it can."""
    stride: int = Field(768, gt=0)
    """New tokens in each further window of a long document; the rest is left context."""
    dev_share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the text on which the combiner is calibrated; whole documents."""
    test_share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the text on which it is measured; whole documents."""
    document_start: str | None = None
    """Regular expression for a line that begins a new document in a file, its first group the name."""
    neighbours: int = Field(512, gt=0)
    """Neighbours that are searched for."""
    positions: int = Field(24_000, gt=0)
    """Training positions that the mixture learns from."""
    held_out: int = Field(20_000, gt=0)
    """Positions of dev that it is calibrated on, and of test that it is measured on, at most."""
    search: float = Field(1.0, gt=0, le=1)
    """Share of the positions that are searched, those for which it pays most."""
    combiner: Literal["adaptive", "knn-lm", "gate"] = "adaptive"
    """What brings the memory in. The paper's gate is only trained if it is asked for here."""
    knn: KnnSettings = KnnSettings()
    """On what grid kNN-LM is tuned."""
    adaptive: AdaptiveSettings = AdaptiveSettings(neighbours=512, batch_size=512, passes=8)
    """The mixture."""
    gate: GateSettings = GateSettings(neighbours=16, distance_bias=True, project_memory=True)
    """The paper's gate."""
    gate_training: GateTraining = GateTraining()
    """How long it is trained."""
    policy: PolicySettings = PolicySettings()
    """What decides where to search."""
    cache: int = Field(2000, gt=0)
    """Positions back that the continuous cache, a dynamic mode, looks at."""
    seed: int = Field(1, ge=0)
    """Of samples."""

    @field_validator("stride")
    @classmethod
    def _within_the_context(cls, stride: int, info: ValidationInfo) -> int:
        if stride > info.data.get("context", stride):
            raise ValueError(f"a window has {info.data['context']} tokens (context); give at most that")
        return stride


@dataclass(frozen=True)
class Base(Travelling):
    """A pretrained model on disk and the way it reads."""

    folder: PretrainedFolder
    digest: str
    hardware: Hardware
    context: int
    stride: int

    @cached_property
    def model(self) -> Pretrained:
        return self.folder.load(self.device)

    @cached_property
    def device(self) -> torch.device:
        return self.hardware.prepare()

    @cached_property
    def encoder(self) -> Encoder:
        context = min(self.context, self.model.longest or self.context)
        lanes = 1 if self.device.type == "cpu" else 16
        return Encoder(
            digest=self.digest,
            width=self.model.width,
            vocabulary=self.model.vocabulary,
            reading=Reading(context, 0, min(self.stride, context), lanes, warm_up=0, by_document=True),
            load=lambda: self.model,
            device=lambda: self.device,
            entries_per_shard=_SAFE,
        )

    def hidden(self, stream: TokenStream, title: str) -> Tensor:
        """h of every position of a text."""
        found = torch.zeros(len(stream), self.model.width)
        with bar(title, len(stream)) as shown:
            for positions, states in self.encoder.hidden(stream, 0, len(stream)):
                found[positions] = states.float().cpu()
                shown.advance(len(positions))
        return found


def is_attached(directory: Path) -> bool:
    return (directory / FILE).is_file()


class Attached:
    """Opened to be used."""

    def __init__(self, directory: Path | str, hardware: Hardware):
        self.directory = Path(directory)
        path = self.directory / FILE
        if not is_attached(self.directory):
            raise InputError(f"{self.directory} holds no model with a memory (no {FILE}); make one with `spalm attach`")
        about = artifact.read_json(path)
        self.settings = AttachSettings.parse(about["settings"], str(path))
        self.source: str = about["source"]
        """What the model was called when it was attached to."""
        folder = PretrainedFolder(self.directory / about["model"])
        if not folder.path.is_dir():
            raise InputError(f"{folder.path}, the model of {self.directory}, is gone; put it back, or attach again")
        self.base = Base(folder, about["digest"], hardware, self.settings.context, self.settings.stride)
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
        """The one that was asked for."""
        return self.combiners[self.settings.combiner]

    @cached_property
    def combiners(self) -> dict[str, Combiner]:
        """All that there are, by their names in the figures."""
        found: dict[str, Combiner] = {
            "plain": Plain(),
            "knn-lm": WithKnn(Plain(), Knn(**self.combined.facts["knn"])),
            "adaptive": WithMixture(Plain(), self.mixture),
        }
        return found | {"gate": ThroughGate(self.gate)} if self.settings.combiner == "gate" else found
