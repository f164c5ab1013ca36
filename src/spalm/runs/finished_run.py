"""A finished run, opened for reading: its text, networks, memory, and the scores of every row on dev and test.

Nothing is computed here and no text is read again, so the source files of the corpus are no longer needed.
"""

from functools import cached_property
from pathlib import Path
from typing import Literal, get_args, overload

import numpy as np

from spalm.corpus import Corpus, Split
from spalm.digests import refuse_changed
from spalm.errors import DamagedError, InputError
from spalm.files import child, read_json
from spalm.lm import TrainedModel
from spalm.memory import Memory
from spalm.neighbours import NeighbourSettings, NeighbourTable
from spalm.runs.evaluation import Unit
from spalm.runs.recipe import Recipe
from spalm.runs.records import Records
from spalm.runs.results import RESULTS, ResultRow
from spalm.runs.rows import REFERENCE_ROW, ROWS, NetworkName, PlainNetwork, RowName, networks_of
from spalm.semiparametric import TrainedSpalm
from spalm.settings import read_yaml

RECIPE = "recipe.yaml"
"""File that holds the recipe of a run."""
_COUNTED = 1 << 22
"""Number of training tokens that are counted at a time."""


class FinishedRun:
    """The directory of a run whose results are written."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        for name in (RESULTS, RECIPE):
            if not (self.directory / name).is_file():
                raise InputError(
                    f"{self.directory} holds no finished run (no {name}); make one with `spalm run RECIPE --out "
                    f"{self.directory}`"
                )
        again = "run the same `spalm run` again"
        refuse_changed(self.directory, [RESULTS, RECIPE], again)
        self.results: list[ResultRow] = read_json(child(self.directory, RESULTS), list[ResultRow], remedy=again)
        self.recipe = Recipe.parse(read_yaml(child(self.directory, RECIPE)), str(self.directory / RECIPE))
        lengths = [row["memory_length"] for row in self.results if row["model"] == REFERENCE_ROW]
        if not lengths:
            raise DamagedError(f"{self.directory / RESULTS} is damaged (no row {REFERENCE_ROW}); {again}")
        self.unit: Unit = self.results[0]["unit"]
        self.memory_length: int = min(lengths)
        """Length of the short-term memory of the records that are shown: the shortest of the results."""
        self._digests = {row["evaluation"]: row["records"] for row in self.results}

    @property
    def title(self) -> str:
        """Title of the recipe."""
        return self.recipe.title

    @property
    def rows(self) -> list[RowName]:
        """Names of the rows of the results, each once."""
        return list(dict.fromkeys(row["model"] for row in self.results))

    @property
    def default_row(self) -> RowName:
        """The row that generates text and is served unless another is named: the last one."""
        return self.rows[-1]

    @property
    def networks(self) -> list[NetworkName]:
        """Names of the networks that the rows are made of, in the order of training."""
        return networks_of(self.rows)

    @cached_property
    def corpus(self) -> Corpus:
        """The text as token arrays."""
        return Corpus(self.directory / "corpus")

    @cached_property
    def memory(self) -> Memory:
        """The long-term memory."""
        return Memory(self.directory / "memory")

    @cached_property
    def neighbours(self) -> NeighbourTable:
        """The neighbours of every position."""
        return NeighbourTable(self.directory / "neighbours", self.memory)

    @property
    def neighbour_settings(self) -> NeighbourSettings:
        """The settings with which the neighbours were found: the recipe's, resolved for the text."""
        return NeighbourSettings.parse(self.neighbours.settings, str(self.neighbours.directory))

    @overload
    def network(self, name: Literal["spalm"]) -> TrainedSpalm: ...
    @overload
    def network(self, name: PlainNetwork) -> TrainedModel: ...
    @overload
    def network(self, name: NetworkName) -> TrainedModel | TrainedSpalm: ...
    def network(self, name: NetworkName) -> TrainedModel | TrainedSpalm:
        """Returns a trained network on disk; its `load` returns the network itself."""
        where = self.directory / name
        return TrainedModel(where) if name in get_args(PlainNetwork) else TrainedSpalm(where)

    def result(self, row: RowName) -> ResultRow:
        """Returns the results of a row at the length of the short-term memory that is shown."""
        found = {each["memory_length"]: each for each in self.results if each["model"] == row}
        return found.get(self.memory_length) or next(iter(found.values()))  # the transformer has one length only

    def records(self, row: RowName) -> Records:
        """Returns a row's scores of every position; refuses scores that changed since the results were written."""
        folder = self.result(row)["evaluation"]
        found = Records(self.directory / folder)
        if found.digest != self._digests[folder]:
            raise InputError(
                f"{found.directory} has changed since {RESULTS} was written; run the same `spalm run` again"
            )
        return found

    def log_probabilities(self, row: RowName, split: Split) -> np.ndarray:
        """Returns log p of every token of a split."""
        return np.asarray(self.records(row).log_probabilities(split), np.float64)

    def network_records(self, row: RowName) -> Records:
        """Returns the scores of the network that a row is made of."""
        return self.records(ROWS[row].network)

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Number of occurrences of each token of the vocabulary in the training text."""
        tokens, counts = self.corpus.split("train").tokens, np.zeros(self.corpus.vocabulary, np.int64)
        for start in range(0, len(tokens), _COUNTED):
            counts += np.bincount(tokens[start : start + _COUNTED], minlength=len(counts))
        return counts
