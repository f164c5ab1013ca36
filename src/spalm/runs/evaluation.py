"""Evaluation of a trained model: the log-probability of every dev and test token, and the figures from them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from spalm.compute import Execution
from spalm.corpus import Corpus, Split, TokenSplit
from spalm.errors import InputError
from spalm.lm import Reading, TrainedModel
from spalm.neighbours import NeighbourTable
from spalm.runs.records import Records, keep_records, records_stage
from spalm.runs.rows import HELD_OUT, HeldOut
from spalm.semiparametric import Matcher, Retriever, Scorer, Spalm, TrainedSpalm
from spalm.settings import Settings

Unit = Literal["perplexity/word", "perplexity/token", "bits/character"]
"""Unit of a figure."""


class EvaluationSettings(Settings):
    """How the models are evaluated, and in which unit the figures are shown."""

    unit: Unit
    """Unit of the figures in the tables; results.json has all three."""
    memory_lengths: list[Annotated[int, Field(ge=0)]] = []
    """Lengths of the short-term memory at test, each in a row of its own; empty for the one used in training."""
    neighbours: int | None = Field(default=None, ge=0)
    """Number of neighbours that SPALM attends to at test; default: as many as in training."""
    lanes: int = Field(default=16, gt=0)
    """Number of places of the text that are read side by side. It changes the speed, not the figures."""
    bf16: bool = False
    """Multiply matrices in bfloat16 where that is safe, as training.bf16 does."""
    stride: int | None = Field(default=None, gt=0)
    """New tokens in each window of one segment when there is no short-term memory; the rest of the window is left
    context. Default: the whole segment."""

    def refuse_long_stride(self, segment: int) -> None:
        """Refuses a stride that is longer than a window of `segment` tokens."""
        if self.stride is not None and self.stride > segment:
            raise InputError(f"evaluation.stride = {self.stride}: windows have {segment} tokens; give at most that")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a model: the settings, the length of its short-term memory, and its neighbours."""

    settings: EvaluationSettings
    memory_length: int
    """Length of the short-term memory at test, whatever it was in training."""
    table: NeighbourTable | None = None
    """Neighbours of every position. With them SPALM uses its memory, and the inputs of mixtures are kept."""
    matches: bool = False
    """Whether the inputs of mixtures are also kept for the exact matches in the table's memory."""


def in_all_units(log_probabilities: np.ndarray, split: TokenSplit) -> dict[Unit, float]:
    """Returns the figures of a split in all three units: the same sum, divided by words, tokens or characters."""
    nats = -float(log_probabilities.sum(dtype=np.float64))
    return {
        "perplexity/word": math.exp(min(nats / max(1, split.words), 700.0)),
        "perplexity/token": math.exp(min(nats / len(split), 700.0)),
        "bits/character": nats / math.log(2) / max(1, split.characters),
    }


def matcher_of(table: NeighbourTable, corpus: Corpus, split: HeldOut) -> Matcher:
    """Returns the exact matches of the positions of a split in the memory of a table."""
    return Matcher(table.memory, corpus.split(split))


def evaluate_model(
    trained: TrainedModel | TrainedSpalm,
    corpus: Corpus,
    evaluation: Evaluation,
    *,
    directory: Path,
    execution: Execution,
) -> Records:
    """Reads dev and test with a trained model and keeps the score of every position at `directory`."""
    settings, table, memory_length = evaluation.settings, evaluation.table, evaluation.memory_length
    if trained.manifest["parents"]["corpus"] != corpus.digest:
        raise InputError(
            f"{trained.directory} was trained on another corpus than {corpus.directory}; give the one it was trained on"
        )
    network, training = trained.model_settings.network, trained.model_settings.training
    settings.refuse_long_stride(training.segment_length)
    reading = Reading.of(
        network.layers,
        segment=training.segment_length,
        memory=memory_length,
        lanes=settings.lanes,
        stride=settings.stride,
    )

    def load_scorer(device: torch.device) -> Scorer:
        retrievers: dict[Split, Retriever] | None = None
        if table is not None:
            count = table.array("dev.ids").shape[1]
            retrievers = {
                split: Retriever(
                    table, split, count, matcher=matcher_of(table, corpus, split) if evaluation.matches else None
                )
                for split in HELD_OUT
            }
        loaded = trained.load(device)
        if isinstance(loaded, Spalm):
            loaded.set_neighbours(settings.neighbours)
            return Scorer(loaded.base, loaded.gate, retrievers)
        return Scorer(loaded, None, retrievers)

    own = {"memory_length": memory_length, **settings.model_dump(include={"lanes", "stride", "bf16", "neighbours"})}
    parents = {"model": trained.digest, "corpus": corpus.digest}
    parents |= {} if table is None else {"neighbours": table.digest}
    parents |= {"memory": table.memory.digest} if table is not None and evaluation.matches else {}
    return keep_records(
        records_stage(own, parents), load_scorer, corpus, reading=reading, directory=directory, execution=execution
    )
