"""A model to numbers: what it says of every dev and test token, and the figures that follow from that."""

import math
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from spalm.corpus import Corpus, TokenSplit
from spalm.errors import InputError
from spalm.learning import Hardware
from spalm.lm import Reading, TrainedModel
from spalm.neighbours import NeighbourTable
from spalm.semiparametric import HELD_OUT, Records, Retriever, Scorer, TrainedSpalm, keep_records
from spalm.settings import Settings

Unit = Literal["perplexity/word", "perplexity/token", "bits/character"]


class EvaluationSettings(Settings):
    unit: Unit
    """What the tables show; results.json has all three."""
    memory_lengths: list[Annotated[int, Field(ge=0)]] = []
    """Lengths of the short-term memory at test, each a row; empty for the one used in training."""
    neighbours: int | None = Field(None, ge=0)
    """Neighbours that SPALM attends to at test; default: as many as in training."""
    lanes: int = Field(16, gt=0)
    """Places of the text read side by side. It changes the speed, not the figures."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe; for GPUs."""
    stride: int | None = Field(None, gt=0)
    """Without memory: new tokens in each window of one segment, the rest is left context; default the whole segment."""


def figures(log_probabilities: np.ndarray, split: TokenSplit) -> dict[str, float]:
    """All three units from the same sum, whatever the tokens are: what differs is only what it is divided by."""
    nats = -float(log_probabilities.sum(dtype=np.float64))
    return {
        "perplexity/word": math.exp(min(nats / split.words, 700.0)),
        "perplexity/token": math.exp(nats / len(split)),
        "bits/character": nats / math.log(2) / split.characters,
    }


def evaluate_model(
    trained: TrainedModel | TrainedSpalm,
    corpus: Corpus,
    memory_length: int,
    settings: EvaluationSettings,
    directory: Path,
    name: str,
    hardware: Hardware,
    restart: bool = False,
    table: NeighbourTable | None = None,
) -> Records:
    """Reads dev and test with a short-term memory of `memory_length`, whatever the model was trained with.

    With a table of neighbours, SPALM uses it, and what mixtures learn from is kept.
    """
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

    def scorer(device: torch.device) -> Scorer:
        loaded = trained.load(device)
        if table is None:
            return Scorer(loaded)
        most = table.array("dev.ids").shape[1]
        retrievers = {split: Retriever(table, split, most) for split in HELD_OUT}
        if not isinstance(trained, TrainedSpalm):
            return Scorer(loaded, None, retrievers)
        loaded.attend_to(settings.neighbours)
        return Scorer(loaded.base, loaded.gate, retrievers)

    own = {"memory_length": memory_length, **settings.model_dump(include={"lanes", "stride", "bf16", "neighbours"})}
    parents = {"model": trained.digest, "corpus": corpus.digest}
    parents |= {} if table is None else {"neighbours": table.digest}
    return keep_records(scorer, corpus, reading, own, parents, directory, name, hardware, settings.bf16, restart)
