"""Significance of the difference between two models: the paper's test on the log-likelihoods of the same tokens."""

from importlib import import_module

import numpy as np


def wilcoxon(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the two-sided p-value of Wilcoxon's signed-rank test; 1 where the two never differ."""
    difference = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    if not difference.any():
        return 1.0
    stats = import_module("scipy.stats")  # takes a second, and most commands need no statistics
    return float(stats.wilcoxon(difference, method="asymptotic").pvalue)
