"""Recipes: the settings of every stage in one file.

Precedence, from weak to strong: defaults < recipe file < `key=value` on the command line.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from spalm.corpus import CorpusSettings
from spalm.errors import InputError
from spalm.lm import ModelSettings, NetworkSettings
from spalm.memory import MemorySettings
from spalm.neighbours import NeighbourSettings
from spalm.runs.evaluation import EvaluationSettings
from spalm.runs.rows import KEY_NETWORK, RowName
from spalm.semiparametric import AdaptiveSettings, KnnSettings, SpalmModelSettings, SpalmSettings
from spalm.settings import Settings, override, read_yaml
from spalm.training import TrainingSettings


class PaperRow(Settings):
    """A row of the paper's tables, shown beside ours."""

    model: str
    """Name of the row."""
    memory_length: int
    """Length of the short-term memory at test."""
    dev: float
    """The paper's figure on dev."""
    test: float
    """The paper's figure on test."""


class Recipe(Settings):
    """The settings of a whole run, from the text to the table of results."""

    title: str
    """Description of the recipe in one line."""
    corpus: CorpusSettings
    """Text and tokeniser."""
    network: NetworkSettings
    """The network that all models of the recipe share."""
    training: TrainingSettings
    """How the models are trained. All train the same way, except that the vanilla transformer has no memory."""
    memory: MemorySettings = MemorySettings()
    """The long-term memory: how the vanilla transformer reads the training text to make keys."""
    neighbours: NeighbourSettings = NeighbourSettings()
    """The neighbours of every position."""
    spalm: SpalmSettings = SpalmSettings()
    """The gate, and the step at which SPALM takes over from transformer-XL."""
    knn: KnnSettings = KnnSettings()
    """The grid on which kNN-LM is tuned."""
    adaptive: AdaptiveSettings = AdaptiveSettings()
    """The adaptive mixture, which goes beyond the paper."""
    evaluation: EvaluationSettings
    """How the models are evaluated."""
    paper: list[PaperRow] = []
    """The paper's figures for this set-up."""

    @model_validator(mode="after")
    def _enough_neighbours(self) -> "Recipe":
        """Refuses a gate that attends to more neighbours than the table holds."""
        gate, table = self.spalm_model.spalm.gate.attended, self.neighbours
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

    @model_validator(mode="after")
    def _strides_within_a_segment(self) -> "Recipe":
        """Refuses strides longer than a segment, which would leave out tokens."""
        segment = self.training.segment_length
        self.memory.stride_in(segment)
        self.evaluation.refuse_long_stride(segment)
        return self

    @property
    def transformer(self) -> ModelSettings:
        """Settings of the vanilla transformer: no short-term memory."""
        training = self.training.model_copy(update={"memory_length": 0})
        return ModelSettings(network=self.network, training=training)

    @property
    def transformer_xl(self) -> ModelSettings:
        """Settings of transformer-XL, which keeps the parameters that SPALM starts from."""
        keep = self.spalm.first_step(self.training.steps) or None
        return ModelSettings(network=self.network, training=self.training, keep_step=keep)

    @property
    def spalm_model(self) -> SpalmModelSettings:
        """Settings of SPALM, with the number of neighbours filled in."""
        count = self.neighbours.count if self.spalm.gate.neighbours is None else self.spalm.gate.neighbours
        gate = self.spalm.gate.model_copy(update={"neighbours": count})
        spalm = self.spalm.model_copy(update={"gate": gate})
        return SpalmModelSettings(network=self.network, training=self.training, spalm=spalm)

    def test_memory_lengths(self, name: RowName) -> list[int]:
        """Returns the lengths of the short-term memory with which a row is evaluated."""
        if name == KEY_NETWORK:
            return [0]
        return self.evaluation.memory_lengths or [self.training.memory_length]


def recipe_folder() -> Path:
    """Returns the folder of the recipes: inside an installed package, at the top of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.exists() else package.parents[1] / "recipes"


def read_recipe(name: str, assignments: Sequence[str] = ()) -> Recipe:
    """Reads a recipe by its name, or by the path of a YAML file, with `key=value` assignments laid over it."""
    own = Path(name)
    path = own if own.suffix in (".yaml", ".yml") else recipe_folder() / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in recipe_folder().glob("*.yaml")))
        raise InputError(f"there is no recipe {name!r}; take one of {known}, or give the path of a .yaml file")
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no settings; see {recipe_folder() / 'demo.yaml'} for the form of a recipe")
    return Recipe.parse(override(values, list(assignments)), path.name)
