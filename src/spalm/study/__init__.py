"""Models in, numbers and tables out: what a model says of held-out text, perplexities, significance, results."""

from spalm.study.evaluate import EvaluationSettings, evaluate_model, figures
from spalm.study.passage import print_passage, where_memory_helped
from spalm.study.results import print_results, row, write_results
from spalm.study.significance import wilcoxon

__all__ = [
    "EvaluationSettings",
    "evaluate_model",
    "figures",
    "print_passage",
    "print_results",
    "row",
    "where_memory_helped",
    "wilcoxon",
    "write_results",
]
