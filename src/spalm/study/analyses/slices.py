"""Perplexity by part of the text: by position in the document, and by how often the token comes in training."""

import numpy as np
from matplotlib.axes import Axes

from spalm.corpus import TokenStream
from spalm.runs import FinishedRun
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS

Bins = dict[str, np.ndarray]
"""Names of parts, in order, and which positions are in them."""


def frequency_bins(run: FinishedRun, targets: np.ndarray) -> Bins:
    """Positions by how often their token comes in the training text: never, then by powers of ten."""
    return _by_powers(run.token_counts[targets], "never", 1, 10)


def position_bins(text: TokenStream) -> Bins:
    """Positions by how many tokens of their document come before: up to 64, then by powers of two."""
    return _by_powers(np.arange(len(text)) - np.repeat(text.begins, text.ends - text.begins), "0 to 63", 64, 2)


def _by_powers(values: np.ndarray, first: str, low: int, factor: int) -> Bins:
    found = {first: values < low}
    while low <= values.max(initial=0):
        found[f"{low:,} to {factor * low - 1:,}"] = (values >= low) & (values < factor * low)
        low *= factor
    return found


def by_frequency(request: AnalysisRequest) -> Analysis:
    text = request.run.corpus.split(request.split)
    bins = frequency_bins(request.run, text.targets(np.arange(len(text))))
    return _sliced(request, "frequency", "By how often the token comes in training", "comes in training", bins)


def by_position(request: AnalysisRequest) -> Analysis:
    bins = position_bins(request.run.corpus.split(request.split))
    return _sliced(request, "position", "By position in the document", "tokens before it", bins)


def _sliced(request: AnalysisRequest, name: str, title: str, what: str, bins: Bins) -> Analysis:
    models = request.run.rows
    values = {model: request.run.log_probabilities(model, request.split) for model in models}
    rows: list[list[Cell]] = [
        [part, int(here.sum()), *(request.figure_of(values[model][here]) for model in models)]
        for part, here in bins.items()
        if here.any()
    ]
    return Analysis(
        name,
        title,
        f"{request.unit_of_tokens} of every model ({request.where}); {what}: as on the axis.",
        {"parts": DataTable([what, "positions", *models], rows)},
        lambda axes: _draw(axes, rows, models, what, request.unit_of_tokens),
        data={"split": request.split, "unit": request.unit_of_tokens},
    )


def _draw(axes: Axes, rows: list[list[Cell]], models: list[str], what: str, unit: str) -> None:
    for number, model in enumerate(models):
        axes.plot([row[2 + number] for row in rows], "o-", ms=3, lw=1.4, label=model, color=COLOURS[number % 6])
    if unit == "perplexity/token":
        axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [row[0] for row in rows], rotation=20, ha="right")
    axes.set_xlabel(what)
    axes.set_ylabel(unit)
    axes.legend(fontsize="small", ncols=2)
