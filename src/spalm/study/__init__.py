"""Models in, numbers and pictures out: what a model says of held-out text, perplexities, analyses, the report."""

from spalm.study.analyses.by_neighbours import COUNTS, vary_neighbours
from spalm.study.analysis import Analysis, Asked
from spalm.study.registry import ANALYSES, asked_for, available, study
from spalm.study.report import write_report

__all__ = [
    "ANALYSES",
    "Analysis",
    "Asked",
    "COUNTS",
    "asked_for",
    "available",
    "study",
    "vary_neighbours",
    "write_report",
]
