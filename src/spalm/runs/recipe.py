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
from spalm.runs.rows import KEY_NETWORK, ROWS, NetworkName, Row, RowName, networks_of
from spalm.semiparametric import (
    AdaptiveSettings,
    ExtendedGateSettings,
    GateSettings,
    KnnSettings,
    SpalmModelSettings,
    SpalmSettings,
)
from spalm.settings import Settings, added_since, override, read_yaml
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
    controls: bool = added_since(default=False)
    """Also train and evaluate the rows that are controls: transformer-xl-restarted and spalm-literal."""
    extended: bool = added_since(default=False)
    """Also train and evaluate spalm-extended, which goes beyond the paper."""
    extended_gate: ExtendedGateSettings = added_since(ExtendedGateSettings())
    """The gate of spalm-extended, which starts where SPALM does and attends to as many neighbours by default."""
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
        extended = self.gated_model("spalm-extended").spalm.gate.attended
        if extended > table.count:
            raise ValueError(
                f"extended_gate.neighbours = {extended}, the table holds neighbours.count = {table.count}; raise that"
            )
        at_test = {"spalm.gate": gate, "extended_gate": extended, "evaluation": self.evaluation.neighbours or 0}
        for name, wanted in at_test.items():
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

    def gated_model(self, name: NetworkName) -> SpalmModelSettings:
        """Returns the settings of a network with a gate; refuses a control that the recipe cannot have."""
        spalm = self.spalm_model.spalm
        if name == "spalm-literal":
            spalm = SpalmSettings(start=0, gate=GateSettings.of_paper(spalm.gate.attended))
        elif name == "spalm-extended":
            spalm = SpalmSettings(start=spalm.start, gate=self.extended_gate.with_neighbours(spalm.gate.attended))
        elif name == "transformer-xl-restarted":
            if not spalm.start:
                raise InputError(
                    "spalm.start = 0: SPALM is trained from scratch, so nothing restarts; give more than 0"
                )
            spalm = SpalmSettings(start=spalm.start, gate=GateSettings.of_paper(neighbours=0))
        return SpalmModelSettings(network=self.network, training=self.training, spalm=spalm)

    @property
    def attended_at_test(self) -> int:
        """Number of neighbours that SPALM attends to at test."""
        chosen = self.evaluation.neighbours
        return self.spalm_model.spalm.gate.attended if chosen is None else chosen

    @property
    def rows(self) -> list[RowName]:
        """Names of the rows of the results, in order."""
        possible = {"transformer-xl-restarted": self.spalm.start > 0, "knn-lm-literal": self.attended_at_test > 0}
        asked = {None: True, "controls": self.controls, "extended": self.extended}
        return [name for name, row in ROWS.items() if asked[row.asked_by] and possible.get(name, True)]

    @property
    def networks(self) -> list[NetworkName]:
        """Names of the networks that the rows are made of, in the order of training."""
        return networks_of(self.rows)

    def knn_grid(self, row: Row) -> KnnSettings:
        """Returns the grid on which a row's kNN-LM is tuned; the paper's has as many neighbours as SPALM."""
        if not row.literal:
            return self.knn
        if not self.attended_at_test:
            raise InputError(f"{row.name} has as many neighbours as SPALM, which is 0 here; give SPALM more")
        return KnnSettings.of_paper(self.attended_at_test)

    def evaluation_of(self, row: Row) -> EvaluationSettings:
        """Returns how the network of a row is evaluated."""
        if not row.overlapping:
            return self.evaluation
        stride = max(1, self.training.segment_length // 4)
        return self.evaluation.model_copy(update={"stride": min(stride, self.evaluation.stride or stride)})

    def test_memory_lengths(self, name: RowName) -> list[int]:
        """Returns the lengths of the short-term memory with which a row is evaluated."""
        if ROWS[name].network == KEY_NETWORK:
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
