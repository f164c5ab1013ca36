"""A model with its memory, open for use: one interface for a pretrained model and for the models of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spalm.attachment import SearchPolicy
from spalm.attachment.attached import ATTACHED_FILE, Attached
from spalm.attachment.policy import ALWAYS_SEARCH
from spalm.compute import Hardware
from spalm.corpus.tokeniser import Tokeniser
from spalm.errors import InputError
from spalm.generation.run_variants import INDEX, reading_of, speakers_of
from spalm.lm import IncrementalReader, LanguageModel, Reading
from spalm.memory import Encoder, Memory, encoder_of
from spalm.runs import RESULTS, FinishedRun
from spalm.semiparametric import Combiner, Search, open_search

OWN_MODELS = ("spalm-adaptive", "spalm+knn", "spalm", "knn-lm", "transformer-xl", "transformer")


@dataclass(frozen=True)
class EncodedTokens:
    """After each token that was read: what predicts the next."""

    hidden: Tensor
    keys: np.ndarray
    """What the memory is searched with."""

    def __getitem__(self, rows: slice) -> "EncodedTokens":
        return EncodedTokens(self.hidden[rows], self.keys[rows])


class Follower(Protocol):
    """Reads a text as it grows; knows how much it has read."""

    def feed(self, tokens: Sequence[int]) -> EncodedTokens: ...
    def copied(self) -> "Follower": ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Live:
    name: str
    model: LanguageModel
    tokeniser: Tokeniser
    memory: Memory
    encoder: Encoder
    """Makes keys of documents that are to be remembered."""
    reading: Reading
    """How the model reads."""
    search: Search
    combiner: Combiner
    device: torch.device
    policy: SearchPolicy | None = None
    """Decides where to search; none: everywhere."""
    threshold: float = ALWAYS_SEARCH
    """The gain that must be expected of a search."""

    @property
    def longest(self) -> int | None:
        """Tokens that a text may have; None: any number."""
        return getattr(self.model, "longest", None)

    @property
    def has_own_keys(self) -> bool:
        """Whether another network than the one that predicts makes the keys."""
        return self.encoder.model is not self.model

    def follow(self) -> Follower:
        own = IncrementalReader(self.model, self.reading, self.device)
        if not self.has_own_keys:
            return _OneNetwork(own, self.memory)
        return _TwoNetworks(own, IncrementalReader(self.encoder.model, self.encoder.reading, self.device), self.memory)


@dataclass(frozen=True)
class _OneNetwork:
    """Its hidden states are the keys too."""

    network: IncrementalReader
    memory: Memory

    def feed(self, tokens: Sequence[int]) -> EncodedTokens:
        hidden = self.network.feed(tokens)
        return EncodedTokens(hidden, self.memory.keys_of(hidden))

    def copied(self) -> "_OneNetwork":
        return _OneNetwork(self.network.copied(), self.memory)

    def __len__(self) -> int:
        return len(self.network)


@dataclass(frozen=True)
class _TwoNetworks:
    """One predicts, another makes the keys."""

    network: IncrementalReader
    keys: IncrementalReader
    memory: Memory

    def feed(self, tokens: Sequence[int]) -> EncodedTokens:
        return EncodedTokens(self.network.feed(tokens), self.memory.keys_of(self.keys.feed(tokens)))

    def copied(self) -> "_TwoNetworks":
        return _TwoNetworks(self.network.copied(), self.keys.copied(), self.memory)

    def __len__(self) -> int:
        return len(self.network)


def open_live(directory: Path | str, hardware: Hardware, model: str | None = None) -> Live:
    """What `spalm attach` made, or a finished run with one of its models."""
    directory = Path(directory)
    if (directory / ATTACHED_FILE).is_file():
        if model is not None:
            raise InputError(f"--model {model}: {directory} is one model with its memory; leave it out")
        return live_attached(Attached(directory, hardware))
    if (directory / RESULTS).is_file():
        return live_run(FinishedRun(directory), hardware, model or OWN_MODELS[0])
    raise InputError(
        f"{directory} holds no model with a memory; make one with `spalm attach MODEL TEXT... --out {directory}`"
    )


def live_attached(attached: Attached) -> Live:
    base, facts = attached.base, attached.combiner_artifact.facts
    return Live(
        name=attached.directory.resolve().name,
        model=base.model,
        tokeniser=attached.corpus.tokeniser,
        memory=attached.memory,
        encoder=base.encoder,
        reading=base.encoder.reading,
        search=attached.search,
        combiner=attached.combiner,
        device=base.device,
        policy=attached.policy if attached.settings.search < 1 else None,
        threshold=facts["threshold"],
    )


def live_run(run: FinishedRun, hardware: Hardware, model: str) -> Live:
    if model not in OWN_MODELS:
        raise InputError(f"--model {model}: {run.directory} has {', '.join(OWN_MODELS)}")
    device = hardware.prepare()
    speaker = next(each for each in speakers_of(run, device)("test", 0) if each.name == model)
    count = run.neighbours.array("dev.ids").shape[1]
    return Live(
        name=f"{run.directory.resolve().name}/{model}",
        model=speaker.base.model,
        tokeniser=run.corpus.tokeniser,
        memory=run.memory,
        encoder=encoder_of(run.network("transformer"), run.recipe.memory, lambda: device),
        reading=reading_of(run, speaker.base.name),
        search=open_search(run.memory, run.directory / INDEX, count),
        combiner=speaker.combiner,
        device=device,
    )
