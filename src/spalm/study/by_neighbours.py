"""Perplexity by number of neighbours (the paper's table 6), in two ways that are told apart:

- retrained: for each number a SPALM is trained with it, as in the paper. Hours at the paper's size;
- at test only: the run's own SPALM is given more or fewer neighbours than it was trained with. Minutes.

Records are kept below the run, so what was made once is not made again.
"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from spalm.learning import Hardware
from spalm.memory import MemorySettings, encoder_of
from spalm.neighbours import Budget, NeighbourSettings, NeighbourTable, find_neighbours
from spalm.semiparametric import FinishedRun, Records, TrainedSpalm, train_spalm
from spalm.study.analysis import Analysis, Asked, Cell, Tabular
from spalm.study.drawing import COLOURS, powers_of_two
from spalm.study.evaluate import EvaluationSettings, evaluate_model, figures

COUNTS = (1, 2, 4, 8, 16)
"""The paper's."""
_FOLDER = "by-neighbours"
_PAPER = {1: 18.0, 2: 18.0, 4: 17.9, 8: 18.2, 16: 18.4}
"""Its perplexity on WikiText-103 dev."""


@dataclass(frozen=True)
class Varied:
    """Where the records of one number of neighbours are."""

    count: int
    retrained: bool

    @property
    def name(self) -> str:
        return f"{'retrained' if self.retrained else 'at-test'}-{self.count}"

    def folder(self, run: FinishedRun) -> Path:
        return run.directory / _FOLDER / f"{self.name}-records"


def vary_neighbours(run: FinishedRun, counts: tuple[int, ...], retrain: bool, hardware: Hardware) -> None:
    """Makes the records for these numbers of neighbours, at test only or by training anew."""
    evaluation = EvaluationSettings.parse(run.recipe["evaluation"], "evaluation")
    trained, table = run.trained("spalm"), run.neighbours
    if retrain:
        table = _wider_table(run, max(counts), hardware)
    for count in counts:
        varied = Varied(count, retrain)
        model = _retrained(run, varied, table, hardware) if retrain else trained
        wanted = evaluation.model_copy(update={"neighbours": count})
        evaluate_model(
            model, run.corpus, run.memory_length, wanted, varied.folder(run), varied.name, hardware, table=table
        )


def _wider_table(run: FinishedRun, count: int, hardware: Hardware) -> NeighbourTable:
    """The neighbours of every position, at least `count` of them."""
    settings = NeighbourSettings.parse(run.recipe["neighbours"], "neighbours")
    if settings.count >= count:
        return run.neighbours
    settings = settings.model_copy(update={"count": count, "held_out": max(count, settings.held_out)})
    memory_settings = MemorySettings.parse(run.recipe["memory"], "memory")
    encoder = encoder_of(run.trained("transformer"), memory_settings, hardware.prepare)
    where, budget = run.directory / _FOLDER / "neighbours", Budget.of(None, hardware.threads)
    return find_neighbours(run.memory, encoder, run.corpus, settings, where, budget)


def _retrained(run: FinishedRun, varied: Varied, table: NeighbourTable, hardware: Hardware) -> TrainedSpalm:
    settings = run.trained("spalm").model_settings
    gate = settings.spalm.gate.model_copy(update={"neighbours": varied.count})
    settings = settings.model_copy(update={"spalm": settings.spalm.model_copy(update={"gate": gate})})
    start = run.trained("transformer-xl") if settings.spalm.first_step(settings.training.steps) else None
    where = run.directory / _FOLDER / varied.name
    return train_spalm(settings, start, run.corpus, table, where, varied.name, hardware)


def made_before(run: FinishedRun) -> dict[Varied, Records]:
    """The numbers of neighbours whose records are there, the run's own among them."""
    own = run.trained("spalm").model_settings.spalm.gate.neighbours
    found = {Varied(own, retrained): run.records("spalm") for retrained in (False, True)}
    for path in sorted((run.directory / _FOLDER).glob("*-records/manifest.json")):
        kind, count = path.parent.name.removesuffix("-records").rsplit("-", 1)
        found[Varied(int(count), kind == "retrained")] = Records(path.parent)
    return found


def by_neighbours(asked: Asked) -> Analysis:
    run, text = asked.run, asked.run.corpus.split(asked.split)
    values = {
        varied: figures(records.log_probabilities(asked.split), text)[run.unit]
        for varied, records in made_before(run).items()
    }
    counts = sorted({varied.count for varied in values})
    rows: list[list[Cell]] = [
        [count, values.get(Varied(count, True)), values.get(Varied(count, False)), _PAPER.get(count)]
        for count in counts
    ]
    own = run.trained("spalm").model_settings.spalm.gate.neighbours
    return Analysis(
        "neighbours",
        "Perplexity by number of neighbours",
        f"{run.unit} of SPALM on {asked.split}. Retrained: trained with that number. At test: the run's own SPALM, "
        f"trained with {own}, given that number. The paper's column is WikiText-103 dev, retrained.",
        {"counts": Tabular(["neighbours", "retrained", "at test", "paper"], rows)},
        lambda axes: _draw(axes, rows, run.unit),
        data={"split": asked.split, "unit": run.unit, "trained_with": own},
    )


def _draw(axes: Axes, rows: list[list[Cell]], unit: str) -> None:
    for number, label in ((1, "retrained"), (2, "at test only")):
        points = [(row[0], row[number]) for row in rows if row[number] is not None]
        axes.plot(*zip(*points), "o-", ms=4, label=label, color=COLOURS[number - 1])
    powers_of_two(axes, [row[0] for row in rows])
    axes.set_xlabel("neighbours")
    axes.set_ylabel(unit)
    axes.legend()
