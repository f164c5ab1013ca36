"""Models in, numbers and tables out: per-token log-probabilities, perplexities, results."""

from spalm.study.evaluate import Evaluation, EvaluationSettings, evaluate_model, figures
from spalm.study.results import print_results, row, write_results

__all__ = [
    "Evaluation",
    "EvaluationSettings",
    "evaluate_model",
    "figures",
    "print_results",
    "row",
    "write_results",
]
