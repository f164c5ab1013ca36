"""The strength curve: what each row with a long-term memory gains as the base language model gets stronger.

A level of strength is the recipe of a finished run, carried out again as a whole with another number of training steps.
So the learning rate of every level has come to its end, as that of the run has; checkpoints of one long run have not.

Levels are kept below the folder of the run, and use its corpus where it is. The run itself is one of them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from spalm.compute import Execution
from spalm.console import say
from spalm.errors import InputError
from spalm.files import is_inside, own_folder
from spalm.memory import source_of_split
from spalm.memory.forgotten import forgotten_documents
from spalm.runs import KEY_NETWORK, REFERENCE_ROW, RESULTS, FinishedRun, HeldOut, Recipe, ResultRow, Run, Unit
from spalm.settings import differences, override
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes

_FOLDER = "by-steps"
_SPALM, _KNN = "spalm", "knn-lm"
"""Beginnings of the names of the rows whose order is compared with the paper's."""
_SAME_NEIGHBOURS = {"spalm-extended": "knn-lm-literal"}
"""Rows of SPALM without a row of kNN-LM of their name, and the one with as many neighbours."""
_EXPECTED = {"title", "paper", "training.steps", "training.evaluate_every", "training.optimiser.warm_up"}
"""Settings in which a level differs from the run by what it is, and those that change no figure."""
_NAMED = 3
"""Highest number of other settings that the caption names for a level."""


def vary_steps(
    run: FinishedRun,
    counts: Sequence[int],
    execution: Execution,
    *,
    assignments: Sequence[str] = (),
    console: Console,
) -> None:
    """Carries out the recipe of a run again with each of these numbers of steps, the lowest first; prints the tables.

    Further settings may be laid over the recipe. A finished level stays as it is, and a killed one is continued. The
    run itself is the level of its own number of steps.
    """
    _refuse_unless_on_training_text(run)
    recipes = [_level_recipe(run, count, assignments) for count in sorted({*counts})]  # before anything is trained
    for recipe in recipes:
        steps = recipe.training.steps
        if steps == run.recipe.training.steps:
            say(f"{steps:,} steps: that is {run.directory} itself")
            continue
        where = own_folder(run.directory, _FOLDER, str(steps))
        Run(recipe, where, execution, shared_corpus=run.corpus.directory).everything(console)


def _refuse_unless_on_training_text(run: FinishedRun) -> None:
    """Refuses a run whose results are with another memory than that of a level, which holds the training text.

    Where training documents were forgotten, a level would also be trained on another text, or on what was forgotten.
    """
    train = run.corpus.split("train")
    forgotten = forgotten_documents(run.memory, source_of_split(run.corpus, "train"), train.begins)
    more = max(row["more_texts_in_memory"] for row in run.results)
    if more or forgotten.any():
        what = f"holds {more:,} more text(s)" if more else f"has forgotten {forgotten.sum():,} training document(s)"
        raise InputError(
            f"{run.directory}: its memory {what}, so further levels cannot be compared with it; carry out the recipe "
            "in another folder, and vary that run"
        )


def _level_recipe(run: FinishedRun, steps: int, assignments: Sequence[str]) -> Recipe:
    """Returns the recipe of a level: that of the run with another number of steps, and `assignments` laid over it.

    A short level is evaluated at least once, and its warm-up takes at most a tenth of it.
    """
    own = run.recipe.training
    warm_up = own.optimiser.warm_up if steps >= own.steps else min(own.optimiser.warm_up, steps // 10)
    scaled = {"steps": steps, "evaluate_every": min(own.evaluate_every, steps), "optimiser.warm_up": warm_up}
    values = override(run.recipe.as_json(), [f"training.{key}={value}" for key, value in scaled.items()])
    recipe = Recipe.parse(override(values, list(assignments)), f"{run.directory} with {steps} steps")
    if recipe.training.steps != steps:
        raise InputError("training.steps: the numbers of steps are given as --steps; leave it out")
    if recipe.corpus != run.recipe.corpus or recipe.evaluation.unit != run.recipe.evaluation.unit:
        raise InputError(
            f"all levels have the corpus and the unit of {run.directory}; leave out corpus and evaluation.unit"
        )
    return recipe


def existing_levels(run: FinishedRun) -> dict[int, FinishedRun]:
    """Returns the run and its finished levels by number of steps; leaves out those on another text or in another unit.

    What lies outside of the run's folder is not read.
    """
    found = {run.recipe.training.steps: run}
    for path in sorted((run.directory / _FOLDER).glob(f"*/{RESULTS}")):
        if is_inside(path.parent, run.directory):
            level = FinishedRun(path.parent)
            text = level.network(KEY_NETWORK).manifest["parents"].get("corpus")
            if text == run.corpus.digest and level.unit == run.unit:
                found.setdefault(level.recipe.training.steps, level)
    return dict(sorted(found.items()))


def by_strength(request: AnalysisRequest) -> Analysis:
    """Compares what every row gains over transformer-xl at each level of strength."""
    run, split = request.run, request.split
    levels = existing_levels(run)
    if len(levels) < 2:
        raise InputError(
            f"{run.directory} has no further levels of strength; make some with `spalm vary {run.directory} --steps "
            "500,2000`"
        )
    results = {
        steps: [level.result(name) for name in level.rows if name != REFERENCE_ROW] for steps, level in levels.items()
    }
    bases = {steps: level.result(REFERENCE_ROW)[split] for steps, level in levels.items()}
    rows: list[list[Cell]] = [
        [steps, bases[steps], each["model"], each[split], *_gain(bases[steps], each[split], run.unit)]
        for steps, found in results.items()
        for each in found
    ]
    with_memory = list(dict.fromkeys(each["model"] for found in results.values() for each in found if _remembers(each)))
    unit, reached = run.unit.split("/")[1], _spalm_reaches_knn(results, split)
    columns = ["steps", REFERENCE_ROW, "model", run.unit, "% gained", f"nats/{unit} gained"]
    return Analysis(
        "strength",
        "By strength of the base",
        f"{run.unit} ({request.where}), and the gain over transformer-xl of the same level, for levels of "
        f"{_listed(levels)} steps. Each level is a complete run of the recipe, whose schedule ends with its last "
        f"step. In the figure, the base is stronger to the right.{_other_settings(run, levels)} {_order(reached)}",
        {"levels": DataTable(columns, rows)},
        lambda axes: _draw(axes, rows, with_memory, bases=bases, unit=run.unit),
        size=(7.0, 4.4),
        data={"split": split, "unit": run.unit, "spalm_at_or_below_knn_lm": reached},
        printed=len(rows),
    )


def _remembers(row: ResultRow) -> bool:
    """Returns whether a row of results has a long-term memory."""
    return row["without_long_term_memory"] is not None


def _gain(base: float, figure: float, unit: Unit) -> tuple[float, float]:
    """Returns what a figure gains over that of the base: in percent, and in nats for each word, token or character."""
    nats = (base - figure) * math.log(2) if unit == "bits/character" else math.log(base / figure)
    return 100 * (1 - figure / base), nats


def _spalm_reaches_knn(results: Mapping[int, Sequence[ResultRow]], split: HeldOut) -> dict[str, dict[str, list[int]]]:
    """Returns the numbers of steps at which rows of SPALM are at or below their rows of kNN-LM, and those at which not.

    `spalm` is compared with `knn-lm`, `spalm-x` with `knn-lm-x` where there is one, and `spalm-extended` with the row
    that has as many neighbours.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for steps, rows in results.items():
        figures: dict[str, float] = {row["model"]: row[split] for row in rows}
        for name in [row["model"] for row in rows if row["model"].startswith(_SPALM)]:
            knn = figures.get(_rival(name))
            if knn is not None:
                places = found.setdefault(name, {"at": [], "not_at": []})
                places["at" if figures[name] <= knn else "not_at"].append(steps)
    return found


def _rival(name: str) -> str:
    """Returns the name of the row of kNN-LM that a row of SPALM is compared with."""
    return _SAME_NEIGHBOURS.get(name, _KNN + name.removeprefix(_SPALM))


def _order(reached: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Returns a sentence on the paper's order of SPALM and kNN-LM."""
    parts = []
    for name, places in reached.items():
        where = f"at {_listed(places['at'])} steps, not at {_listed(places['not_at'])}"
        if not places["at"] or not places["not_at"]:
            where = "at every level" if places["at"] else "at no level"
        parts.append(f"{name} is at or below {_rival(name)} {where}")
    return f"The paper's order: {'; '.join(parts)}." if parts else ""


def _listed(counts: Mapping[int, Any] | Sequence[int]) -> str:
    """Returns numbers as they are listed in a sentence."""
    *first, last = [f"{count:,}" for count in counts] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _other_settings(run: FinishedRun, levels: Mapping[int, FinishedRun]) -> str:
    """Returns a sentence on each level whose recipe differs from that of the run in more than its number of steps."""
    own, said = run.recipe.as_json(), ""
    for steps, level in levels.items():
        lines = [line for line in differences(own, level.recipe.as_json()) if line.split(":")[0] not in _EXPECTED]
        named = "; ".join(lines[:_NAMED]) + (f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")
        said += f" The level of {steps:,} steps has other settings ({named})." if lines else ""
    return said


def _draw(
    axes: Axes, rows: Sequence[list[Any]], names: Sequence[str], *, bases: Mapping[int, float], unit: str
) -> None:
    """Draws a line for each of the rows with these names."""
    for number, name in enumerate(names):
        points = np.array(sorted((row[1], row[4]) for row in rows if row[2] == name))
        style = ("o-", "s--", "^:")[number // len(COLOURS) % 3]
        axes.plot(*points.T, style, ms=4, lw=1.4, label=name, color=COLOURS[number % len(COLOURS)])
    axes.axhline(0, color=COLOURS[-1], lw=0.8)
    axes.set_xscale("log")
    axes.set_xticks([*bases.values()], [f"{base:,.4g}\n{steps:,} steps" for steps, base in bases.items()])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel(f"{unit} of {REFERENCE_ROW} (stronger to the right)")
    axes.set_ylabel("% gained")
    axes.legend(fontsize="small", ncols=2)
