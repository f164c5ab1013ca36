"""Perplexity by number of neighbours (the paper's table 5), in two ways:

- retrained: a SPALM is trained with each number, as in the paper. This takes hours at the paper's size;
- at test only: the run's own SPALM is given more or fewer neighbours than it was trained with. This takes minutes.

Records are kept below the folder of the run and made only once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spalm.artifact import Artifact
from spalm.compute import Execution
from spalm.memory import encoder_of
from spalm.neighbours import NeighbourTable, find_neighbours
from spalm.runs import KEY_NETWORK, FinishedRun, Records, attended_at_test
from spalm.runs.evaluation import Evaluation, evaluate_model, in_all_units
from spalm.semiparametric import TrainedSpalm, train_spalm
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes

COUNTS = (1, 2, 4, 8, 16)
"""Numbers of neighbours in the paper's table."""
_FOLDER = "by-neighbours"
_PAPER = {1: 18.0, 2: 18.0, 4: 17.9, 8: 18.2, 16: 18.4}
"""The paper's perplexity on WikiText-103 dev, by number of neighbours."""


@dataclass(frozen=True)
class NeighbourVariant:
    """A number of neighbours, and whether SPALM was trained with it."""

    count: int
    retrained: bool = field(kw_only=True)

    def model(self, run: FinishedRun) -> Path:
        """Returns the folder of the trained SPALM."""
        return run.directory / _FOLDER / f"retrained-{self.count}" if self.retrained else run.directory / "spalm"

    def records(self, run: FinishedRun) -> Path:
        """Returns the folder of the records."""
        return run.directory / _FOLDER / f"{'retrained' if self.retrained else 'at-test'}-{self.count}-records"


def vary_neighbours(run: FinishedRun, counts: tuple[int, ...], execution: Execution, *, retrain: bool) -> None:
    """Makes the records for these numbers of neighbours, at test only or, with `retrain`, by training again."""
    table = _wide_table(run, max(counts), execution, for_training=retrain)
    for variant in (NeighbourVariant(count, retrained=retrain) for count in counts):
        model = _retrained(run, variant, table, execution=execution) if retrain else run.network("spalm")
        settings = run.recipe.evaluation.model_copy(update={"neighbours": variant.count})
        evaluation = Evaluation(settings, run.memory_length, table)
        evaluate_model(model, run.corpus, evaluation, directory=variant.records(run), execution=execution)


def _wide_table(run: FinishedRun, count: int, execution: Execution, *, for_training: bool) -> NeighbourTable:
    """Returns the neighbours of every position, at least `count` of them where they are needed."""
    settings = run.neighbour_settings
    wider = settings.model_copy(
        update={
            "count": max(count, settings.count) if for_training else settings.count,
            "held_out": max(count, settings.held_out),
        }
    )
    if wider == settings:
        return run.neighbours
    encoder = encoder_of(run.network(KEY_NETWORK), run.recipe.memory, execution.hardware.prepare)
    where = run.directory / _FOLDER / "neighbours"
    return find_neighbours(run.memory, encoder, run.corpus, settings=wider, directory=where, execution=execution)


def _retrained(
    run: FinishedRun, variant: NeighbourVariant, table: NeighbourTable, *, execution: Execution
) -> TrainedSpalm:
    """Trains a SPALM with another number of neighbours, as the run's own was trained."""
    settings = run.network("spalm").model_settings
    gate = settings.spalm.gate.model_copy(update={"neighbours": variant.count})
    settings = settings.model_copy(update={"spalm": settings.spalm.model_copy(update={"gate": gate})})
    start = run.network("transformer-xl") if settings.first_step else None
    return train_spalm(settings, start, run.corpus, table=table, directory=variant.model(run), execution=execution)


def existing_variants(run: FinishedRun) -> dict[NeighbourVariant, Records]:
    """Returns the records of the run's own SPALM and of its variants; leaves out those made before the run changed."""
    trained_with = run.network("spalm").model_settings.spalm.gate.attended
    own = run.records("spalm")
    tested_with = attended_at_test(run.network("spalm"), own)
    found = {NeighbourVariant(tested_with, retrained=False): own}
    if tested_with == trained_with:
        found[NeighbourVariant(tested_with, retrained=True)] = own
    for path in sorted((run.directory / _FOLDER).glob("*-records/manifest.json")):
        kind, count = path.parent.name.removesuffix("-records").rsplit("-", 1)
        variant, records = NeighbourVariant(int(count), retrained=kind == "retrained"), Records(path.parent)
        model = Artifact(variant.model(run))
        of_this_run = model.manifest["parents"].get("start") == run.network("spalm").manifest["parents"].get("start")
        same = records.manifest["parents"]["model"] == model.digest and of_this_run
        if same and records.settings["memory_length"] == run.memory_length:
            found[variant] = records
    return found


def by_neighbours(request: AnalysisRequest) -> Analysis:
    """Compares the numbers of neighbours that were tried, retrained and at test only."""
    run, text = request.run, request.run.corpus.split(request.split)
    values = {
        variant: in_all_units(records.log_probabilities(request.split), text)[run.unit]
        for variant, records in existing_variants(run).items()
    }
    paper = _PAPER if run.recipe.paper and run.unit == "perplexity/word" else {}
    rows: list[list[Cell]] = [
        [
            count,
            values.get(NeighbourVariant(count, retrained=True)),
            values.get(NeighbourVariant(count, retrained=False)),
            *([paper.get(count)] if paper else []),
        ]
        for count in sorted({variant.count for variant in values})
    ]
    own = run.network("spalm").model_settings.spalm.gate.neighbours
    return Analysis(
        "neighbours",
        "By number of neighbours",
        f"{run.unit} of SPALM ({request.where}). Retrained: trained with that number. At test: the run's own SPALM, "
        f"trained with {own}, given that number." + (" Paper: WikiText-103 dev, retrained." if paper else ""),
        {"counts": DataTable(["neighbours", "retrained", "at test", *(["paper"] if paper else [])], rows)},
        lambda axes: _draw(axes, rows, run.unit),
        data={"split": request.split, "unit": run.unit, "trained_with": own},
    )


def _draw(axes: Axes, rows: list[list[Any]], unit: str) -> None:
    for number, label in ((1, "retrained"), (2, "at test only")):
        points = [(place, row[number]) for place, row in enumerate(rows) if row[number] is not None]
        if points:
            axes.plot(*zip(*points), "o-", ms=4, label=label, color=COLOURS[number - 1])
    axes.set_xticks(range(len(rows)), [str(row[0]) for row in rows])
    axes.set_xlabel("neighbours")
    axes.set_ylabel(unit)
    axes.legend()
