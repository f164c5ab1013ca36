"""Records: a model's scores of every position of dev and test, kept on disk.

| array | a row is |
|---|---|
| log_probabilities | log p of the actual token |
| without_memory | log p of the actual token with the long-term memory ablated (SPALM only) |
| gate | g_t (SPALM only) |
| copied | c_t: share of the probabilities that goes to copied tokens (a SPALM that copies) |
| neighbours, distances, attention | ids of the entries attended to, how far they are, and their weights (SPALM only) |
| entropy, highest, hidden | inputs of the adaptive mixture, where neighbours are known |
| of_retrieved, of_matched | log p of the neighbours' tokens, and of those that followed exact matches |
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from pydantic import BaseModel
from torch import Tensor

from spalm.artifact import Artifact, Draft, Stage
from spalm.compute import Execution, autocast
from spalm.console import bar
from spalm.corpus import Corpus, Split, TokenSplit
from spalm.errors import DamagedError, InputError
from spalm.files import read_json, write_json
from spalm.lm import Reading
from spalm.manifest import Count, Size
from spalm.runs.rows import HELD_OUT
from spalm.semiparametric import BaseOutputs, Knn, Retriever, Scorer, TrainingExamples, score_positions

KIND = "records"
"""Kind of artifact."""
_VERSION = 2
_MOST_NATS = 1e5
"""Upper bound of the absolute value of a log-probability."""
_BLOCK_TOKENS = 1 << 16
"""Number of tokens read between two saves; a kill loses no more than these."""


def records_stage(settings: dict[str, Any], parents: dict[str, str]) -> Stage:
    """Returns the stage of a model's records."""
    return Stage(KIND, _VERSION, settings, parents, cheap=True)


class _Facts(BaseModel):
    """The form of the facts about records: of those that a mixture made."""

    knn: Knn | None = None
    dev_border: Count | None = None
    neighbours: Count | None = None
    width: Size | None = None
    levels: Count = 0


class Records(Artifact):
    """Finished records of dev and test."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, KIND, _Facts)
        self._plausible: set[Split] = set()
        """Splits whose log-probabilities were looked at."""
        if self.manifest["version"] != _VERSION:
            raise InputError(f"{self.directory} was made by another version of spalm; run the same command again")

    def of(self, split: Split, name: str) -> np.ndarray:
        """Returns one of the arrays of a split."""
        return self.array(f"{split}.{name}")

    def log_probabilities(self, split: Split) -> np.ndarray:
        """Returns log p of tokens[i], for every i of the split; refuses numbers that cannot be any."""
        found = self.of(split, "log_probabilities")
        if split not in self._plausible:
            if not (np.abs(found) < _MOST_NATS).all():
                raise DamagedError(
                    f"{self.directory}: {split}.log_probabilities is damaged; run the same command again"
                )
            self._plausible.add(split)
        return found

    def has(self, name: str) -> bool:
        """Returns whether an array was kept."""
        return f"dev.{name}" in self.manifest["files"]

    def examples(self, split: TokenSplit, retriever: Retriever, rows: Int[np.ndarray, "n"]) -> TrainingExamples:
        """Returns the inputs of the adaptive mixture at some positions of a split, to learn from or to be scored."""

        def read(name: str) -> Tensor:
            return torch.from_numpy(np.array(self.of(split.split, name)[rows])).float()

        retrieved = retriever(rows)
        of_retrieved = read("of_retrieved")[:, : retrieved.tokens.shape[-1]]
        of_matched = None if retrieved.matched is None else read("of_matched")
        base = BaseOutputs(read("hidden"), read("entropy"), read("highest"), of_retrieved, of_matched)
        targets = torch.from_numpy(split.targets(rows))
        return TrainingExamples(base, retrieved, read("log_probabilities"), targets)


def keep_records(
    stage: Stage,
    load_scorer: Callable[[torch.device], Scorer],
    corpus: Corpus,
    *,
    reading: Reading,
    directory: Path,
    execution: Execution,
) -> Records:
    """Reads dev and test with a model and keeps its scores at `directory`.

    The settings and parents of the stage identify the model and the way it reads.
    """

    def fill(draft: Draft) -> tuple[dict, list[str]]:
        device = execution.hardware.prepare()
        scorer = load_scorer(device)
        with autocast(device, bf16=bool(stage.settings["bf16"])):
            for split in map(corpus.split, HELD_OUT):
                _read(scorer, split, reading, draft=draft)
        return {}, []

    stage.make(directory, fill, restart=execution.restart)
    return Records(directory)


def _read(scorer: Scorer, split: TokenSplit, reading: Reading, *, draft: Draft) -> None:
    """Appends the scores of a split block by block; those that a killed run had written are kept."""
    # A block is so long that the warm-up of its lanes takes only a small part of the time.
    block = max(_BLOCK_TOKENS, 4 * reading.lanes * reading.warm_up * reading.segment)
    block = reading.stride * max(1, block // reading.stride)
    progress = draft.scratch(f"{split.split}.done.json")
    done = read_json(progress)["positions"] if progress.exists() else 0
    with bar(f"{draft.directory.name} reads {split.split}", len(split), done) as shown:
        for start in range(done, len(split), block):
            stop = min(start + block, len(split))
            arrays = score_positions(scorer, split, reading, positions=range(start, stop), progress=shown.advance)
            for name, rows in arrays.items():
                _append(draft.directory / f"{split.split}.{name}", rows, start)
            kinds = {name: [rows.dtype.str, *rows.shape[1:]] for name, rows in arrays.items()}
            write_json(progress, {"positions": stop, "arrays": kinds})
    for name, (dtype, *tail) in read_json(progress)["arrays"].items():
        draft.declare(f"{split.split}.{name}", dtype, (len(split), *tail))


def _append(path: Path, rows: np.ndarray, start: int) -> None:
    """Writes rows after the first `start` rows of a file; what a killed run wrote beyond those is discarded."""
    path.touch()
    with path.open("r+b") as file:
        offset = start * rows[:1].nbytes
        assert path.stat().st_size >= offset, f"{path} is shorter than it was"
        file.truncate(offset)
        file.seek(offset)
        file.write(rows.tobytes())
        file.flush()
        os.fsync(file.fileno())
