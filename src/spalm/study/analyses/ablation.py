"""The cost of taking the long-term memory away."""

import math
from typing import Any

import numpy as np

from spalm.runs import ROWS, in_all_units, without_memory
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes


def ablation_cost(request: AnalysisRequest) -> Analysis:
    """Compares every model with itself without its long-term memory."""
    run, split, text = request.run, request.split, request.run.corpus.split(request.split)
    rows: list[list[Cell]] = []
    for model in run.rows:
        alone = without_memory(ROWS[model], run.network_records(model), split)
        ablated = None if alone is None else in_all_units(alone, text)[run.unit]
        found = in_all_units(run.log_probabilities(model, split), text)[run.unit]
        rows.append([model, found, ablated, None if ablated is None else 100 * (ablated / found - 1)])
    return Analysis(
        "ablation",
        "What it costs to take the memory away",
        f"{run.unit} ({request.where}) with the long-term memory and without it. A model that learned to lean on its "
        "memory is worse without it than one that never had any.",
        {"models": DataTable(["model", "with", "without", "% worse without"], rows)},
        lambda axes: _draw_ablation(axes, rows, run.unit),
        data={"split": split, "unit": run.unit},
    )


def _draw_ablation(axes: Axes, rows: list[list[Any]], unit: str) -> None:
    places = np.arange(len(rows))
    axes.bar(places - 0.2, [row[1] for row in rows], 0.38, label="with memory", color=COLOURS[0])
    axes.bar(places + 0.2, [row[2] or math.nan for row in rows], 0.38, label="without", color=COLOURS[1])
    axes.set_xticks(places, [row[0] for row in rows])
    axes.set_ylabel(unit)
    axes.legend()
