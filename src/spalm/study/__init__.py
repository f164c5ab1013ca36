"""Models in, numbers and pictures out: what a model says of held-out text, perplexities, analyses, the report."""

from spalm.study.analysis import Analysis, Asked
from spalm.study.attached import print_attached
from spalm.study.by_neighbours import COUNTS, vary_neighbours
from spalm.study.evaluate import EvaluationSettings, evaluate_model, figures
from spalm.study.passage import passage_of, print_passage, where_memory_helped
from spalm.study.plan_table import print_plan
from spalm.study.planning import Cluster, Wanted, parse_count, plan
from spalm.study.registry import ANALYSES, asked_for, available, study
from spalm.study.report import write_report
from spalm.study.results import print_results, row, write_results
from spalm.study.significance import wilcoxon

__all__ = [
    "ANALYSES",
    "COUNTS",
    "Analysis",
    "Asked",
    "Cluster",
    "EvaluationSettings",
    "Wanted",
    "asked_for",
    "available",
    "evaluate_model",
    "figures",
    "parse_count",
    "passage_of",
    "plan",
    "print_attached",
    "print_passage",
    "print_plan",
    "print_results",
    "row",
    "study",
    "vary_neighbours",
    "where_memory_helped",
    "wilcoxon",
    "write_report",
    "write_results",
]
