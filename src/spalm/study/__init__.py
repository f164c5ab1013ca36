"""A finished run in, tables and figures out: the analyses, and a report on one page."""

from spalm.study.analyses.by_neighbours import COUNTS, vary_neighbours
from spalm.study.analyses.by_strength import vary_steps
from spalm.study.analysis import Analysis, AnalysisRequest
from spalm.study.registry import (
    ANALYSES,
    analyse_attached,
    available_analyses,
    find_analysis,
    make_request,
    run_analyses,
)
from spalm.study.report import write_report

__all__ = [
    "ANALYSES",
    "Analysis",
    "AnalysisRequest",
    "COUNTS",
    "analyse_attached",
    "available_analyses",
    "find_analysis",
    "make_request",
    "run_analyses",
    "vary_neighbours",
    "vary_steps",
    "write_report",
]
