"""Significance of the difference between every two models."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spalm.runs.significance import wilcoxon
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import Axes, write_text


def pairwise_significance(request: AnalysisRequest) -> Analysis:
    """Compares every two models by Wilcoxon's signed-rank test."""
    models = request.run.rows
    values = {model: request.run.log_probabilities(model, request.split) for model in models}
    rows: list[list[Cell]] = []
    for number, one in enumerate(models):
        for other in models[number + 1 :]:
            gain = float((values[other] - values[one]).mean())
            rows.append([one, other, gain, wilcoxon(values[one], values[other])])
    return Analysis(
        "significance",
        "Every model against every other",
        f"Mean gain in log-probability per token ({request.where}; nats) of the second model over the first, and p "
        "of Wilcoxon's signed-rank test (two-sided) on the same tokens. In the picture: the gain of a column's model "
        "over a row's; n.s.: p of 0.05 or more.",
        {"pairs": DataTable(["model", "against", "gain", "p"], rows)},
        lambda axes: _draw_pairs(axes, models, rows),
        (6.4, 4.2),
        {"split": request.split},
    )


def _draw_pairs(axes: Axes, models: Sequence[str], rows: list[list[Any]]) -> None:
    gains = np.zeros((len(models), len(models)))
    for one, other, gain, p in rows:
        i, j = models.index(one), models.index(other)
        gains[i, j], gains[j, i] = gain, -gain
        for x, y, value in ((j, i, gain), (i, j, -gain)):
            write_text(axes, x, y, text=f"{value:+.3f}" if p < 0.05 else "n.s.", ha="center", va="center", fontsize=8)
    most = max(1e-9, float(np.abs(gains).max()))
    axes.imshow(gains, cmap="RdYlGn", vmin=-most, vmax=most, alpha=0.55)
    axes.set_xticks(range(len(models)), models, rotation=30, ha="right")
    axes.set_yticks(range(len(models)), models)
