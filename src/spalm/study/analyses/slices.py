"""Perplexity by part of the text: by position in the document, and by frequency of the token in training."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spalm.corpus import TokenStream
from spalm.runs import FinishedRun
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes

Bins = dict[str, np.ndarray]
"""Masks of positions by the name of the bin, in order."""


def frequency_bins(run: FinishedRun, targets: np.ndarray) -> Bins:
    """Returns positions by the frequency of their token in the training text: never, then by powers of ten."""
    return _by_powers(run.token_counts[targets], "never", 1, factor=10)


def position_bins(text: TokenStream) -> Bins:
    """Returns positions by the number of tokens before them in their document: up to 63, then by powers of two."""
    return _by_powers(np.arange(len(text)) - np.repeat(text.begins, text.ends - text.begins), "0 to 63", 64, factor=2)


def _by_powers(values: np.ndarray, first: str, low: int, *, factor: int) -> Bins:
    """Returns a bin called `first` for values below `low`, then bins that begin at powers of `factor` times `low`."""
    found = {first: values < low}
    while low <= values.max(initial=0):
        found[f"{low:,} to {factor * low - 1:,}"] = (values >= low) & (values < factor * low)
        low *= factor
    return found


def by_frequency(request: AnalysisRequest) -> Analysis:
    """Compares the models by frequency of the token in training."""
    text = request.run.corpus.split(request.split)
    bins = frequency_bins(request.run, text.targets(np.arange(len(text))))
    return _sliced(
        request, "frequency", "By how often the token comes in training", label="comes in training", bins=bins
    )


def by_position(request: AnalysisRequest) -> Analysis:
    """Compares the models by position in the document."""
    bins = position_bins(request.run.corpus.split(request.split))
    return _sliced(request, "position", "By position in the document", label="tokens before it", bins=bins)


def _sliced(request: AnalysisRequest, name: str, title: str, *, label: str, bins: Bins) -> Analysis:
    """Returns the analysis of every model's perplexity by bin; `label` names what the bins are made by."""
    models = request.run.rows
    values = {model: request.run.log_probabilities(model, request.split) for model in models}
    rows: list[list[Cell]] = [
        [part, int(here.sum()), *(request.in_token_unit(values[model][here]) for model in models)]
        for part, here in bins.items()
        if here.any()
    ]
    return Analysis(
        name,
        title,
        f"{request.token_unit} of every model ({request.where}); {label}: as on the axis.",
        {"parts": DataTable([label, "positions", *models], rows)},
        lambda axes: _draw(axes, rows, models, label=label, unit=request.token_unit),
        data={"split": request.split, "unit": request.token_unit},
    )


def _draw(axes: Axes, rows: list[list[Any]], models: Sequence[str], *, label: str, unit: str) -> None:
    for number, model in enumerate(models):
        axes.plot([row[2 + number] for row in rows], "o-", ms=3, lw=1.4, label=model, color=COLOURS[number % 6])
    if unit == "perplexity/token":
        axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [row[0] for row in rows], rotation=20, ha="right")
    axes.set_xlabel(label)
    axes.set_ylabel(unit)
    axes.legend(fontsize="small", ncols=2)
