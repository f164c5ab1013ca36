"""A run: the stages of a recipe, carried out in order. Each is an artifact in a folder of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar, overload

import yaml
from rich.console import Console

from spalm.compute import Execution
from spalm.console import say
from spalm.corpus import Corpus, build_corpus, tokenise_files
from spalm.digests import updating_sums
from spalm.files import write_atomically
from spalm.lm import TrainedModel, train_model
from spalm.memory import Encoder, Memory, encoder_of, open_memory, remember, source_of_split, source_of_text
from spalm.neighbours import NeighbourSettings, NeighbourTable, find_neighbours
from spalm.runs.checks import exclusion_notice, refuse_unless_trainable, resolve_exclusion
from spalm.runs.evaluation import Evaluation, evaluate_model
from spalm.runs.finished_run import RECIPE
from spalm.runs.mixtures import mix_adaptively, mix_knn
from spalm.runs.passage import SplitPassage, print_passage, where_memory_helped
from spalm.runs.recipe import Recipe
from spalm.runs.records import Records
from spalm.runs.results import RESULTS, ResultRow, print_results, result_row, write_results
from spalm.runs.rows import KEY_NETWORK, REFERENCE_ROW, ROWS, NetworkName, PlainNetwork, RowName
from spalm.semiparametric import TrainedSpalm, train_spalm

Made = TypeVar("Made")
_PASSAGE_TOKENS = 16
"""Tokens of the passage that is printed at the end."""


@dataclass(frozen=True)
class Run:
    """A recipe being carried out at a directory. Each stage makes the stages that it needs."""

    recipe: Recipe
    directory: Path
    execution: Execution = field(default_factory=Execution)
    shared_corpus: Path | None = None
    """Folder of a finished corpus that is used where it is; None: the run makes its own from the recipe."""
    _networks: dict[NetworkName, TrainedModel | TrainedSpalm] = field(default_factory=dict)
    _records: dict[tuple[RowName, int], Records] = field(default_factory=dict)
    _inputs: dict[tuple[NetworkName, int], Records] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hardware = self.execution.hardware
        hardware.refuse_fsdp_on_one_rank()
        ranks = hardware.ranks
        ranks.refuse_unless_equal(self.recipe.as_json(), "recipes", "start all with the same recipe and settings")
        ranks.own_lanes(self.recipe.training.batch_size)
        ranks.refuse_unless_shared(self.directory)

    def everything(self, console: Console) -> None:
        """Carries out all stages, in order, and prints the table. Ranks train together; the first does the rest."""
        self.corpus  # noqa: B018
        self.neighbour_settings  # noqa: B018
        for name in self.recipe.networks:
            self.network(name)
        if self.execution.hardware.ranks.is_first:
            self._finish([each for name in self.recipe.rows for each in self.rows(name)], console)

    @cached_property
    def corpus(self) -> Corpus:
        """The text as token arrays."""
        where, restart = self.directory / "corpus", self.execution.restart
        if self.shared_corpus is not None:
            return Corpus(self.shared_corpus)
        return self._on_first_rank(
            lambda: build_corpus(self.recipe.corpus, where, restart=restart), lambda: Corpus(where)
        )

    @cached_property
    def neighbour_settings(self) -> NeighbourSettings:
        """The recipe's settings of neighbours, with an exclusion that suits the text; a text too short is refused."""
        refuse_unless_trainable(self.recipe, self.corpus)
        train, wanted = self.corpus.split("train"), self.recipe.neighbours
        resolved = resolve_exclusion(wanted, train)
        notice = exclusion_notice(wanted, resolved, train)
        if notice and self.execution.hardware.ranks.is_first:
            say(f"{notice} (neighbours.document=false, neighbours.window={resolved.window})")
        return resolved

    @overload
    def network(self, name: PlainNetwork) -> TrainedModel: ...
    @overload
    def network(self, name: NetworkName) -> TrainedModel | TrainedSpalm: ...
    def network(self, name: NetworkName) -> TrainedModel | TrainedSpalm:
        """Returns a trained network."""
        if name not in self._networks:
            self._networks[name] = self._train(name)
        return self._networks[name]

    def _train(self, name: NetworkName) -> TrainedModel | TrainedSpalm:
        where, recipe = self.directory / name, self.recipe
        self.neighbour_settings  # noqa: B018 - refuses a text that is too short before training on it
        if name == "transformer":
            return train_model(recipe.transformer, self.corpus, where, execution=self.execution)
        if name == "transformer-xl":
            return train_model(recipe.transformer_xl, self.corpus, where, execution=self.execution)
        settings = recipe.gated_model(name)
        start = self.network("transformer-xl") if settings.first_step else None
        return train_spalm(
            settings, start, self.corpus, table=self.neighbours, directory=where, execution=self.execution
        )

    @cached_property
    def encoder(self) -> Encoder:
        """The vanilla transformer, frozen: its hidden states are the keys of the long-term memory."""
        return encoder_of(self.network(KEY_NETWORK), self.recipe.memory, self.execution.hardware.prepare)

    @cached_property
    def memory(self) -> Memory:
        """The long-term memory, with every position of the training text in it."""
        train, where = self.corpus.split("train"), self.directory / "memory"
        memory = open_memory(where, self.encoder, self.recipe.memory, stream=train, restart=self.execution.restart)
        remember(memory, self.encoder, train, source=source_of_split(self.corpus, "train"), execution=self.execution)
        return memory

    def remember(self, paths: list[Path]) -> Memory:
        """Adds the documents of files to the memory and returns it."""
        if paths:
            stream = tokenise_files(paths, self.corpus.tokeniser)
            remember(self.memory, self.encoder, stream, source=source_of_text(stream), execution=self.execution)
        return self.memory

    @cached_property
    def neighbours(self) -> NeighbourTable:
        """The neighbours of every training, dev and test position."""
        where, settings = self.directory / "neighbours", self.neighbour_settings
        self.network(KEY_NETWORK)  # all ranks train it, the first alone searches

        def find() -> NeighbourTable:
            return find_neighbours(
                self.memory, self.encoder, self.corpus, settings=settings, directory=where, execution=self.execution
            )

        return self._on_first_rank(find, lambda: NeighbourTable(where, Memory(self.directory / "memory")))

    def records(self, name: RowName, memory_length: int) -> Records:
        """Returns the scores of every dev and test position by a row with a short-term memory of that length."""
        if (name, memory_length) not in self._records:
            self._records[name, memory_length] = self._score(name, memory_length)
        return self._records[name, memory_length]

    def _score(self, name: RowName, memory_length: int) -> Records:
        """Makes the records of a row: by evaluating its network, or by a mixture on top of the network's records."""
        row, recipe, folder = ROWS[name], self.recipe, self.directory / "evaluation"
        where = folder / f"{name}-{memory_length}"
        if row.mixture is None:
            table = self.neighbours if row.gated else None
            return self._evaluate(row.network, Evaluation(recipe.evaluation_of(row), memory_length, table), where)
        if row.mixture == "adaptive" and not row.gated:
            inner = self._mixture_inputs(row.network, memory_length)
            return mix_adaptively(
                inner, self.corpus, self.neighbours, settings=recipe.adaptive, directory=where, sources=row.sources
            )
        grid = recipe.knn_grid(row) if row.mixture == "knn" else None  # may refuse, before anything is made
        inner = self.records(row.network, memory_length)
        if grid is not None:
            return mix_knn(inner, self.corpus, self.neighbours, settings=grid, directory=where)
        return mix_adaptively(inner, self.corpus, self.neighbours, settings=recipe.adaptive, directory=where)

    def _mixture_inputs(self, network: NetworkName, memory_length: int) -> Records:
        """Returns the scores of a network with all inputs of a mixture of both sources."""
        if (network, memory_length) not in self._inputs:
            where = self.directory / "evaluation" / f"inputs-{network}-{memory_length}"
            evaluation = Evaluation(self.recipe.evaluation, memory_length, self.neighbours, matches=True)
            self._inputs[network, memory_length] = self._evaluate(network, evaluation, where)
        return self._inputs[network, memory_length]

    def _evaluate(self, network: NetworkName, evaluation: Evaluation, where: Path) -> Records:
        """Makes the records of a network at a folder."""
        return evaluate_model(self.network(network), self.corpus, evaluation, directory=where, execution=self.execution)

    def rows(self, name: RowName) -> list[ResultRow]:
        """Returns the results of a row: one for each length of the short-term memory at test."""
        return [self._row(name, memory_length) for memory_length in self.recipe.test_memory_lengths(name)]

    def _row(self, name: RowName, memory_length: int) -> ResultRow:
        """Returns the results of a row at one length of the short-term memory."""
        row = ROWS[name]
        names: list[RowName] = [name, row.network, *([] if row.compared_with is None else [row.compared_with])]
        records: dict[RowName, Records] = {each: self.records(each, memory_length) for each in names}
        result = result_row(
            row, self.network(row.network), records, corpus=self.corpus, unit=self.recipe.evaluation.unit
        )
        more_texts = self.neighbours.facts.get("more_texts", 0) if row.has_memory else 0
        return {**result, "more_texts_in_memory": more_texts}

    def _finish(self, rows: list[ResultRow], console: Console) -> None:
        """Writes the recipe and the results, and prints the results."""
        with updating_sums(self.directory, [RECIPE, RESULTS]):
            write_atomically(self.directory / RECIPE, yaml.safe_dump(self.recipe.as_json(), sort_keys=False))
            write_results(rows, self.directory)
        print_results(rows, self.recipe.title, self.recipe.paper, console=console)
        self._show_passage(console)
        console.print(f"written to {self.directory / RESULTS}", highlight=False)

    def _show_passage(self, console: Console) -> None:
        """Prints the passage of test in which the long-term memory helped most."""
        memory_length = self.recipe.test_memory_lengths("spalm")[0]
        spalm, reference = self.records("spalm", memory_length), self.records(REFERENCE_ROW, memory_length)
        rows = where_memory_helped(self.corpus.split("test"), spalm, reference, length=_PASSAGE_TOKENS)
        console.print("Where the long-term memory helped most in test; retrieved tokens that came are in green.")
        print_passage(
            SplitPassage(self.corpus, "test", rows), spalm, reference, entries=self.memory.entries(), console=console
        )

    def _on_first_rank(self, make: Callable[[], Made], open_made: Callable[[], Made]) -> Made:
        """Makes an artifact on the first rank, while the others wait and then open it."""
        hardware = self.execution.hardware
        ranks = hardware.ranks
        if not ranks.is_first:
            ranks.wait_for_first()
            return open_made()
        if ranks.distributed:
            hardware.prepare()  # also uses the cores of the ranks that wait
        made = make()
        ranks.wait_for_first()
        return made
