"""Recipes: the settings of every stage in one file, and the stages run in order.

What counts, from weak to strong: defaults < recipe file < key=value on the command line.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import model_validator
from rich.console import Console

from spalm import artifact
from spalm.corpus import Corpus, CorpusSettings, build_corpus, tokenise_files
from spalm.engine import Engine, LocalEngine
from spalm.errors import InputError
from spalm.learning import Hardware, TrainingSettings
from spalm.lm import ModelSettings, NetworkSettings, TrainedModel, train_model
from spalm.memory import (
    Encoder,
    Memory,
    MemorySettings,
    encoder_of,
    open_memory,
    remember,
    source_of_split,
    source_of_text,
)
from spalm.neighbours import Budget, NeighbourSettings, NeighbourTable, find_neighbours
from spalm.semiparametric import (
    HELD_OUT,
    RECIPE,
    AdaptiveSettings,
    FinishedRun,
    KnnSettings,
    Records,
    SpalmModelSettings,
    SpalmSettings,
    TrainedSpalm,
    mix_adaptively,
    mix_knn,
    train_spalm,
)
from spalm.settings import Settings, override
from spalm.study import (
    EvaluationSettings,
    Wanted,
    evaluate_model,
    print_passage,
    print_results,
    row,
    where_memory_helped,
    write_results,
)

ModelName = Literal["transformer", "transformer-xl", "spalm"]
MODELS: tuple[ModelName, ...] = ("transformer", "transformer-xl", "spalm")
"""What is trained."""
RowName = Literal["transformer", "transformer-xl", "knn-lm", "spalm", "spalm+knn", "spalm-adaptive"]
ROWS: dict[RowName, ModelName] = {
    "transformer": "transformer",
    "transformer-xl": "transformer-xl",
    "knn-lm": "transformer-xl",
    "spalm": "spalm",
    "spalm+knn": "spalm",
    "spalm-adaptive": "spalm",
}
"""The rows of the results, and the model that each of them is made of."""

Opened = TypeVar("Opened")


class PaperRow(Settings):
    """A row of the paper's tables, shown beside ours."""

    model: str
    memory_length: int
    dev: float
    test: float


class Recipe(Settings):
    title: str
    """What the recipe is, in a line."""
    corpus: CorpusSettings
    """Text and tokeniser."""
    network: NetworkSettings
    """The network that all models of the recipe share."""
    training: TrainingSettings
    """How they are trained: all the same way, but that the vanilla transformer has no memory."""
    memory: MemorySettings = MemorySettings()
    """The long-term memory: how the vanilla transformer reads the training text to make keys."""
    neighbours: NeighbourSettings = NeighbourSettings()
    """The neighbours of every position."""
    spalm: SpalmSettings = SpalmSettings()
    """The gate, and where SPALM takes over from transformer-XL."""
    knn: KnnSettings = KnnSettings()
    """On what grid kNN-LM is tuned."""
    adaptive: AdaptiveSettings = AdaptiveSettings()
    """The adaptive mixture, which goes beyond the paper."""
    evaluation: EvaluationSettings
    """How they are evaluated."""
    paper: list[PaperRow] = []
    """The paper's figures for this set-up."""

    @model_validator(mode="after")
    def _enough_neighbours(self) -> "Recipe":
        """What is attended to must be in the table."""
        gate, table = self._spalm.gate.neighbours, self.neighbours
        if gate > table.count:
            raise ValueError(
                f"spalm.gate.neighbours = {gate}, the table holds neighbours.count = {table.count}; raise that"
            )
        for name, wanted in (("spalm.gate", gate), ("evaluation", self.evaluation.neighbours or 0)):
            if wanted > table.held_out:
                raise ValueError(
                    f"{name}.neighbours = {wanted}, the table holds neighbours.held_out = {table.held_out}; raise that"
                )
        return self

    def model(self, name: ModelName) -> ModelSettings:
        """The settings of transformer or transformer-XL; SPALM's are the latter's, and more."""
        if name == "spalm":
            return SpalmModelSettings(network=self.network, training=self.training, spalm=self._spalm)
        if name == "transformer-xl":
            keep = self.spalm.first_step(self.training.steps) or None
            return ModelSettings(network=self.network, training=self.training, keep_step=keep)
        training = self.training.model_copy(update={"memory_length": 0})
        return ModelSettings(network=self.network, training=training)

    @property
    def _spalm(self) -> SpalmSettings:
        """With the number of neighbours filled in."""
        count = self.neighbours.count if self.spalm.gate.neighbours is None else self.spalm.gate.neighbours
        return self.spalm.model_copy(update={"gate": self.spalm.gate.model_copy(update={"neighbours": count})})

    def memory_of(self, tokens: float) -> Wanted:
        """A memory of so many tokens, as this recipe would make it."""
        segment, width, carried = self.training.segment_length, self.network.width, self.memory.carried
        stride = segment if carried else self.memory.stride_in(segment)
        width = min(self.memory.key_width or width, width)
        return Wanted(tokens, self.network, segment, stride, carried, width, self.neighbours)

    def test_memories(self, name: RowName) -> list[int]:
        """Lengths of the short-term memory to evaluate a model with."""
        if name == "transformer":
            return [0]
        return self.evaluation.memory_lengths or [self.training.memory_length]


def recipe_folder() -> Path:
    """Where the recipes are: inside an installed package, at the top of a checkout."""
    installed = Path(__file__).parent / "recipes"
    return installed if installed.exists() else Path(__file__).parents[2] / "recipes"


def read_recipe(name: str, assignments: list[str]) -> Recipe:
    """A recipe by its name, or by the path of a YAML file of one's own."""
    own = Path(name)
    path = own if own.suffix in (".yaml", ".yml") else recipe_folder() / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in recipe_folder().glob("*.yaml")))
        raise InputError(f"there is no recipe {name!r}; take one of {known}, or give the path of a .yaml file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no settings; see {recipe_folder() / 'demo.yaml'} for the form of a recipe")
    return Recipe.parse(override(values, assignments), path.name)


@dataclass(frozen=True)
class Run:
    """A recipe being carried out. Each stage is an artifact below the directory; asking for one makes those before."""

    recipe: Recipe
    directory: Path
    hardware: Hardware
    tensorboard: bool = False
    restart: bool = False
    ram: int | None = None
    """Bytes that the search for neighbours may use on a machine."""
    engine: Engine | None = None
    """Where keys are made and neighbours searched for; default: here."""
    _trained: dict[ModelName, TrainedModel | TrainedSpalm] = field(default_factory=dict)
    _records: dict[tuple[RowName, int], Records] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = self.hardware.ranks
        self.hardware.refuse_unless_ranks()
        ranks.same(self.recipe.as_json(), "recipes", "start all with the same recipe and settings")
        ranks.share(self.recipe.training.batch_size)
        ranks.share_folder(self.directory)

    def _by_the_first(self, make: Callable[[], Opened], opened: Callable[[], Opened]) -> Opened:
        """What one process makes: the first rank, while the others wait and then open it."""
        ranks = self.hardware.ranks
        if not ranks.first:
            ranks.tell()
            return opened()
        if ranks.many:
            self.hardware.prepare()  # with the cores of those that wait
        made = make()
        ranks.tell()
        return made

    @cached_property
    def _engine(self) -> Engine:
        return self.engine or LocalEngine(self.hardware.threads)

    @cached_property
    def corpus(self) -> Corpus:
        where = self.directory / "corpus"
        return self._by_the_first(lambda: build_corpus(self.recipe.corpus, where, self.restart), lambda: Corpus(where))

    def model(self, name: ModelName) -> TrainedModel | TrainedSpalm:
        if name not in self._trained:
            self._trained[name] = self._spalm() if name == "spalm" else self._language_model(name)
        return self._trained[name]

    def _language_model(self, name: ModelName) -> TrainedModel:
        settings, where = self.recipe.model(name), self.directory / name
        return train_model(settings, self.corpus, where, name, self.hardware, self.tensorboard, self.restart)

    def _spalm(self) -> TrainedSpalm:
        settings, where = self.recipe.model("spalm"), self.directory / "spalm"
        start = self.model("transformer-xl") if settings.spalm.first_step(settings.training.steps) else None
        table = self.neighbours
        return train_spalm(
            settings, start, self.corpus, table, where, "spalm", self.hardware, self.tensorboard, self.restart
        )

    @cached_property
    def encoder(self) -> Encoder:
        """The vanilla transformer, frozen: its hidden states are the keys."""
        return encoder_of(self.model("transformer"), self.recipe.memory, self.hardware.prepare)

    @cached_property
    def memory(self) -> Memory:
        """The long-term memory, with every position of the training text in it."""
        train = self.corpus.split("train")
        memory = open_memory(self.directory / "memory", self.encoder, self.recipe.memory, train, self.restart)
        source = source_of_split(self.corpus, "train")
        remember(memory, self.encoder, train, source, self.restart, engine=self._engine)
        return memory

    def remember(self, paths: list[Path]) -> Memory:
        """The memory with the documents of more files in it."""
        if paths:
            stream = tokenise_files(paths, self.corpus.tokeniser)
            source = source_of_text(stream)
            remember(self.memory, self.encoder, stream, source, self.restart, engine=self._engine)
        return self.memory

    @cached_property
    def neighbours(self) -> NeighbourTable:
        """The neighbours of every training, dev and test position."""
        where = self.directory / "neighbours"
        self.model("transformer")  # which reads the text: all ranks train it, one searches

        def find() -> NeighbourTable:
            how = Budget.of(self.ram, self._engine), self.restart, self._engine
            return find_neighbours(self.memory, self.encoder, self.corpus, self.recipe.neighbours, where, *how)

        return self._by_the_first(find, lambda: NeighbourTable(where, Memory(self.directory / "memory")))

    def records(self, name: RowName, memory_length: int) -> Records:
        """What a model says of every dev and test position, with a short-term memory of that length."""
        if (name, memory_length) not in self._records:
            self._records[name, memory_length] = self._make_records(name, memory_length)
        return self._records[name, memory_length]

    def _make_records(self, name: RowName, memory_length: int) -> Records:
        where = self.directory / "evaluation" / f"{name}-{memory_length}"
        model, recipe = ROWS[name], self.recipe
        if name == model:
            table = self.neighbours if name == "spalm" else None
            how = recipe.evaluation, where, name, self.hardware, self.restart, table
            return evaluate_model(self.model(model), self.corpus, memory_length, *how)
        base = self.records(model, memory_length)
        if name == "spalm-adaptive":
            return mix_adaptively(base, self.corpus, self.neighbours, recipe.adaptive, where, name)
        return mix_knn(base, self.corpus, self.neighbours, recipe.knn, where, name)

    def rows(self, name: RowName) -> list[dict[str, Any]]:
        """The rows of the results that one model gives: one for each memory length at test."""
        return [self._row(name, memory_length) for memory_length in self.recipe.test_memories(name)]

    def _row(self, name: RowName, memory_length: int) -> dict[str, Any]:
        found, trained = self.records(name, memory_length), self.model(ROWS[name])
        about = name, trained, found, self.corpus, self.recipe.evaluation.unit
        if name == ROWS[name] != "spalm":
            return row(*about)
        reference = self.records("transformer-xl", memory_length)
        if ROWS[name] == "spalm":
            spalm = self.records("spalm", memory_length)
            ablated = {split: spalm.of(split, "without_memory") for split in HELD_OUT}
        else:
            ablated = {split: reference.log_probabilities(split) for split in HELD_OUT}
        return row(*about, reference, ablated, self.neighbours.facts.get("more_texts", 0))

    def everything(self, console: Console) -> None:
        """All stages, then the table and results.json. Ranks train together; the first does the rest."""
        if self.hardware.ranks.many:
            for name in MODELS:
                self.model(name)
        if not self.hardware.ranks.first:
            return
        rows = [each for name in ROWS for each in self.rows(name)]
        artifact.write_atomically(self.directory / RECIPE, yaml.safe_dump(self.recipe.as_json(), sort_keys=False))
        write_results(rows, self.directory)
        _look_like_a_model(FinishedRun(self.directory))
        print_results(rows, self.recipe.title, [each.model_dump() for each in self.recipe.paper], console)
        self._show_passage(console)
        console.print(f"written to {self.directory / 'results.json'}", highlight=False)

    def _show_passage(self, console: Console, length: int = 16) -> None:
        memory_length = self.recipe.test_memories("spalm")[0]
        spalm, reference = (self.records(name, memory_length) for name in ("spalm", "transformer-xl"))
        rows = where_memory_helped(self.corpus.split("test"), spalm, reference, "test", length)
        console.print("Where the long-term memory helped most in test; retrieved tokens that came are in green.")
        print_passage(self.corpus, "test", rows, spalm, reference, self.memory.entries(), console)


def _look_like_a_model(run: FinishedRun) -> None:
    from spalm.serving.model_files import look_like_a_model  # the server's libraries take their time

    look_like_a_model(run)
