"""Models in, numbers and pictures out: what a model says of held-out text, perplexities, analyses, the report."""

from spalm.study.analyses.by_neighbours import COUNTS, vary_neighbours
from spalm.study.analysis import Analysis, AnalysisRequest
from spalm.study.registry import ANALYSES, available, find_analysis, make_request, study
from spalm.study.report import write_report

__all__ = [
    "ANALYSES",
    "Analysis",
    "AnalysisRequest",
    "COUNTS",
    "available",
    "find_analysis",
    "make_request",
    "study",
    "vary_neighbours",
    "write_report",
]
