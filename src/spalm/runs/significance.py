"""Significance of the difference between two models: the paper's test on the log-likelihoods of the same tokens."""

import numpy as np


def wilcoxon(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the two-sided p-value of Wilcoxon's signed-rank test; 1 where the two never differ."""
    from scipy import stats  # takes a second to import, and most commands need no statistics

    difference = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    if not difference.any():
        return 1.0
    return float(stats.wilcoxon(difference, method="asymptotic").pvalue)  # pyright: ignore[reportAttributeAccessIssue]
