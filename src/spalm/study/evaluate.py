"""A model to numbers: log-probabilities of every dev and test token, and the figures that follow from them."""

import math
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from spalm import artifact
from spalm.artifact import Artifact
from spalm.console import bar
from spalm.corpus import Corpus, TokenSplit
from spalm.errors import InputError
from spalm.learning import Hardware, autocast
from spalm.lm import Reading, TrainedModel, log_probabilities
from spalm.settings import Settings

KIND = "evaluation"
VERSION = 1
HELD_OUT = ("dev", "test")
_BLOCK_TOKENS = 1 << 16
"""Tokens evaluated between two savings: a kill loses no more than this."""

Unit = Literal["perplexity/word", "perplexity/token", "bits/character"]


class EvaluationSettings(Settings):
    unit: Unit
    """What the tables show; results.json has all three."""
    memory_lengths: list[Annotated[int, Field(ge=0)]] = []
    """Lengths of the short-term memory at test, each a row; empty for the one used in training."""
    lanes: int = Field(16, gt=0)
    """Places of the text read side by side. It changes the speed, not the figures."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe; for GPUs."""
    stride: int | None = Field(None, gt=0)
    """Without memory: new tokens in each window of one segment, the rest is left context; default the whole segment."""


class Evaluation(Artifact):
    """A finished evaluation: per-token log-probabilities and what they amount to."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, KIND)

    def log_probabilities(self, split: str) -> np.ndarray:
        """log p of tokens[i], for every i of the split."""
        return self.array(f"{split}.log_probabilities")


def figures(log_probabilities: np.ndarray, split: TokenSplit) -> dict[str, float]:
    """All three units from the same sum, whatever the tokens are: what differs is only what it is divided by."""
    nats = -float(log_probabilities.sum(dtype=np.float64))
    return {
        "perplexity/word": math.exp(min(nats / split.words, 700.0)),
        "perplexity/token": math.exp(nats / len(split)),
        "bits/character": nats / math.log(2) / split.characters,
    }


def evaluate_model(
    trained: TrainedModel,
    corpus: Corpus,
    memory_length: int,
    settings: EvaluationSettings,
    directory: Path,
    name: str,
    hardware: Hardware,
    restart: bool = False,
) -> Evaluation:
    """Scores dev and test with a short-term memory of `memory_length`, whatever the model was trained with."""
    if trained.manifest["parents"]["corpus"] != corpus.digest:
        raise InputError(
            f"{trained.directory} was trained on another corpus than {corpus.directory}; give the one it was trained on"
        )
    network, training = trained.model_settings.network, trained.model_settings.training
    if settings.stride is not None and settings.stride > training.segment_length:
        raise InputError(
            f"evaluation.stride = {settings.stride}: windows have {training.segment_length} tokens; give at most that"
        )
    reading = Reading.of(network.layers, training.segment_length, memory_length, settings.lanes, settings.stride)

    def make(draft: artifact.Draft) -> tuple[dict, list[str]]:
        device = hardware.prepare()
        model = trained.load(device)
        facts = {}
        for split in map(corpus.split, HELD_OUT):
            found = _score(model, split, reading, draft, f"evaluate {name} on {split.split}", settings.bf16, device)
            facts[split.split] = figures(found, split)
        return facts, []

    own = {"memory_length": memory_length, **settings.model_dump(include={"lanes", "stride", "bf16"})}
    parents = {"model": trained.digest, "corpus": corpus.digest}
    artifact.stage(directory, KIND, VERSION, own, parents, make, restart, cheap=True)
    return Evaluation(directory)


def _score(
    model, split: TokenSplit, reading: Reading, draft: artifact.Draft, title: str, bf16: bool, device
) -> np.ndarray:
    """Appends log-probabilities block by block; what a killed run had written is kept."""
    name = f"{split.split}.log_probabilities"
    path = draft.directory / name
    # Long enough that the lanes' warm-up is a small part of it.
    block = max(_BLOCK_TOKENS, 4 * reading.lanes * reading.warm_up * reading.segment)
    block = reading.stride * max(1, block // reading.stride)
    path.touch()
    done = path.stat().st_size // 4 // block * block
    with path.open("r+b") as file, bar(title, len(split), done) as shown:
        file.truncate(4 * done)
        file.seek(4 * done)
        for start in range(done, len(split), block):
            stop = min(start + block, len(split))
            with autocast(device, bf16):
                found = log_probabilities(model, split, reading, start, stop, device, shown.advance)
            file.write(found.astype("<f4").tobytes())
            file.flush()
    draft.declare(name, "<f4", (len(split),))
    return np.fromfile(path, "<f4")
