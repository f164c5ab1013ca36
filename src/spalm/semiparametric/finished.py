"""A finished run, opened for reading: its text, models, memory, and what every model said of dev and test.

Nothing is made here and no text is read again, so the corpus' source files need not be at hand any more.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from spalm.artifact import read_json
from spalm.corpus import Corpus, Split
from spalm.errors import InputError
from spalm.lm import TrainedModel
from spalm.memory import Memory
from spalm.neighbours import NeighbourTable
from spalm.semiparametric.records import Records
from spalm.semiparametric.training import TrainedSpalm

RESULTS, RECIPE = "results.json", "recipe.yaml"


class FinishedRun:
    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        for name in (RESULTS, RECIPE):
            if not (self.directory / name).is_file():
                raise InputError(
                    f"{self.directory} holds no finished run (no {name}); make one with `spalm run RECIPE --out "
                    f"{self.directory}`"
                )
        try:
            self.rows: list[dict[str, Any]] = read_json(self.directory / RESULTS)
            self.recipe: dict[str, Any] = yaml.safe_load((self.directory / RECIPE).read_text(encoding="utf-8"))
            self.title, self.unit = str(self.recipe["title"]), str(self.rows[0]["unit"])
            lengths = [row["memory_length"] for row in self.rows if row["model"] == "transformer-xl"]
            self.memory_length: int = min(lengths)
            """Of the short-term memory, in what is shown: the shortest of the results."""
            self._records = {row["evaluation"]: row["records"] for row in self.rows}
        except (ValueError, KeyError, IndexError, TypeError, yaml.YAMLError):
            raise InputError(
                f"{self.directory}: {RESULTS} or {RECIPE} is damaged or of another version; run the same `spalm run` "
                "again"
            ) from None

    @property
    def models(self) -> list[str]:
        """The rows of the results, without those of further memory lengths."""
        return list(dict.fromkeys(row["model"] for row in self.rows))

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(self.directory / "corpus")

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.directory / "memory")

    @cached_property
    def neighbours(self) -> NeighbourTable:
        return NeighbourTable(self.directory / "neighbours", self.memory)

    def trained(self, name: str) -> TrainedModel | TrainedSpalm:
        return (TrainedSpalm if name == "spalm" else TrainedModel)(self.directory / name)

    def row(self, model: str) -> dict[str, Any]:
        """A model's row with the memory length of what is shown; the transformer has only one."""
        rows = {row["memory_length"]: row for row in self.rows if row["model"] == model}
        return rows.get(self.memory_length) or next(iter(rows.values()))

    def records(self, model: str) -> Records:
        folder = self.row(model)["evaluation"]
        found = Records(self.directory / folder)
        if found.digest != self._records[folder]:
            raise InputError(
                f"{found.directory} has changed since {RESULTS} was written; run the same `spalm run` again"
            )
        return found

    def log_probabilities(self, model: str, split: Split) -> np.ndarray:
        """log p of every token of a split."""
        return np.asarray(self.records(model).log_probabilities(split), np.float64)

    @cached_property
    def token_counts(self) -> np.ndarray:
        """How often each token of the vocabulary comes in the training text."""
        tokens, counts = self.corpus.split("train").tokens, np.zeros(self.corpus.vocabulary, np.int64)
        for start in range(0, len(tokens), 1 << 22):
            counts += np.bincount(tokens[start : start + (1 << 22)], minlength=len(counts))
        return counts
