"""What a model says of every position of the held-out text, kept: log-probabilities, and what mixtures learn from.

| array | a row is |
|---|---|
| log_probabilities | log p of the token that came |
| without_memory | the same with the long-term memory ablated (SPALM only) |
| gate | g_t (SPALM only) |
| neighbours, distances, attention | ids of the entries attended to, how far they are, and their weights (SPALM only) |
| entropy, highest, of_retrieved, hidden | what the adaptive mixture sees, where neighbours are at hand |
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm import artifact
from spalm.artifact import Artifact
from spalm.console import bar
from spalm.corpus import Corpus, Split, TokenSplit
from spalm.errors import InputError
from spalm.learning import Hardware, autocast
from spalm.lm import LanguageModel, Reading, hidden_states
from spalm.lm.reading import refuse_divergence
from spalm.neighbours import NOTHING
from spalm.semiparametric.adaptive import Lesson, Said
from spalm.semiparametric.gate import Gate
from spalm.semiparametric.retrieval import Retrieved, Retriever

KIND = "records"
VERSION = 2
HeldOut = Literal["dev", "test"]
HELD_OUT: tuple[HeldOut, ...] = ("dev", "test")
_BLOCK_TOKENS = 1 << 16
"""Tokens read between two savings: a kill loses no more than this."""
_ROWS = 1024
"""Positions whose distributions over the vocabulary are held at a time."""


@dataclass(frozen=True)
class Scorer:
    """A model, and what it uses besides its short-term memory."""

    model: LanguageModel
    gate: Gate | None = None
    retrievers: dict[Split, Retriever] | None = None
    everything: bool = True
    """Not only log-probabilities."""

    def score(self, split: TokenSplit, positions: Int[np.ndarray, "n"], hidden: Float[Tensor, "n width"]):
        """The arrays' rows of some positions, by name."""
        targets = torch.from_numpy(split.targets(positions)).to(hidden.device)
        if self.retrievers is None:
            return {"log_probabilities": self.model.target_log_probabilities(hidden, targets)}
        retrieved = self.retrievers[split.split](positions).to(hidden.device)
        found, mixed = {}, hidden
        if self.gate is not None:
            attended = retrieved.first(self.gate.settings.neighbours)
            through = self.gate(hidden, attended, self.model)
            mixed = through.vectors
            found["gate"], found["attention"] = through.gate.half(), through.attention.half()
            found["neighbours"], found["distances"] = attended.ids, attended.distances
        if not self.everything:
            return {"log_probabilities": self.model.target_log_probabilities(mixed, targets)}
        if self.gate is not None:
            found["without_memory"] = self.model.target_log_probabilities(hidden, targets)
        parts = [
            self._said(hidden[rows], mixed[rows], retrieved[rows], targets[rows])
            for rows in torch.arange(len(hidden), device=hidden.device).split(_ROWS)
        ]
        return {**found, **{name: torch.cat([part[name] for part in parts]) for name in parts[0]}}

    def _said(self, hidden: Tensor, mixed: Tensor, retrieved: Retrieved, targets: Tensor) -> dict[str, Tensor]:
        log_probabilities = self.model.log_probabilities(mixed)
        said = Said.of(hidden, log_probabilities, retrieved)
        return {
            "log_probabilities": log_probabilities.gather(-1, targets[:, None])[:, 0],
            "entropy": said.entropy,
            "highest": said.highest,
            "of_retrieved": said.of_retrieved.half(),
            "hidden": said.hidden.half(),
        }


class Records(Artifact):
    """Finished records of dev and test."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, KIND)
        if self.manifest["version"] != VERSION:
            raise InputError(f"{self.directory} was made by another version of spalm; run the same command again")

    def of(self, split: Split, name: str) -> np.ndarray:
        return self.array(f"{split}.{name}")

    def log_probabilities(self, split: Split) -> np.ndarray:
        """log p of tokens[i], for every i of the split."""
        return self.of(split, "log_probabilities")

    def has(self, name: str) -> bool:
        return f"dev.{name}" in self.manifest["files"]

    def lesson(self, split: TokenSplit, retriever: Retriever, rows: Int[np.ndarray, "n"]) -> Lesson:
        """Positions of a split for a mixture to learn from, or to be scored on."""

        def read(name: str) -> Tensor:
            return torch.from_numpy(np.array(self.of(split.split, name)[rows])).float()

        retrieved = retriever(rows)
        of_retrieved = read("of_retrieved")[:, : retrieved.tokens.shape[-1]]
        said = Said(read("hidden"), read("entropy"), read("highest"), of_retrieved)
        return Lesson(said, retrieved, read("log_probabilities"), torch.from_numpy(split.targets(rows)))


def keep_records(
    scorer: Callable[[torch.device], Scorer],
    corpus: Corpus,
    reading: Reading,
    settings: dict[str, Any],
    parents: dict[str, str],
    directory: Path,
    name: str,
    hardware: Hardware,
    bf16: bool = False,
    restart: bool = False,
) -> Records:
    """Reads dev and test with a model and keeps what it says; `settings` and `parents` say which model and how."""

    def make(draft: artifact.Draft) -> tuple[dict, list[str]]:
        device = hardware.prepare()
        loaded = scorer(device)
        for split in map(corpus.split, HELD_OUT):
            _read(loaded, split, reading, draft, f"{name} reads {split.split}", bf16, device)
        return {}, []

    artifact.stage(directory, KIND, VERSION, settings, parents, make, restart, cheap=True)
    return Records(directory)


def _read(
    scorer: Scorer, split: TokenSplit, reading: Reading, draft: artifact.Draft, title: str, bf16: bool, device
) -> None:
    """Appends rows block by block; what a killed run had written is kept."""
    # Long enough that the lanes' warm-up is a small part of it.
    block = max(_BLOCK_TOKENS, 4 * reading.lanes * reading.warm_up * reading.segment)
    block = reading.stride * max(1, block // reading.stride)
    progress = draft.scratch(f"{split.split}.done.json")
    done = artifact.read_json(progress)["positions"] if progress.exists() else 0
    with bar(title, len(split), done) as shown:
        for start in range(done, len(split), block):
            stop = min(start + block, len(split))
            with autocast(device, bf16):
                arrays = _score(scorer, split, reading, start, stop, device, shown.advance)
            for name, rows in arrays.items():
                _append(draft.directory / f"{split.split}.{name}", rows, start)
            kinds = {name: [rows.dtype.str, *rows.shape[1:]] for name, rows in arrays.items()}
            artifact.write_json(progress, {"positions": stop, "arrays": kinds})
    for name, (dtype, *tail) in artifact.read_json(progress)["arrays"].items():
        draft.declare(f"{split.split}.{name}", dtype, (len(split), *tail))


def _append(path: Path, rows: np.ndarray, start: int) -> None:
    """Puts rows behind the first `start`, which are on disk: they were synced before they were counted."""
    path.touch()
    with path.open("r+b") as file:
        offset = start * rows[:1].nbytes
        assert path.stat().st_size >= offset, f"{path} is shorter than it was"
        file.truncate(offset)
        file.seek(offset)
        file.write(rows.tobytes())
        file.flush()
        os.fsync(file.fileno())


def mean_loss(scorer: Scorer, split: TokenSplit, reading: Reading, stop: int, device: torch.device) -> float:
    """Mean negative log-likelihood of the first `stop` positions."""
    arrays = _score(scorer, split, reading, 0, stop, device, lambda _: None)
    return -float(arrays["log_probabilities"].mean(dtype="float64"))


@torch.inference_mode()
def _score(scorer: Scorer, split, reading: Reading, start: int, stop: int, device, advance) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for positions, hidden in hidden_states(scorer.model, split, reading, start, stop, device):
        for name, rows in scorer.score(split, positions, hidden).items():
            found = rows.cpu().numpy()
            if name not in arrays:
                nothing_yet = np.nan if np.issubdtype(found.dtype, np.floating) else NOTHING
                arrays[name] = np.full((stop - start, *found.shape[1:]), nothing_yet, found.dtype)
            arrays[name][positions - start] = found
        advance(len(positions))
    refuse_divergence(arrays["log_probabilities"])
    return arrays
