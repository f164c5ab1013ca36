"""Recall is judged by distance: which of several equally near entries was found does not matter."""

import numpy as np
import pytest

from spalm.neighbours.recall import recall_at_k

INF = np.inf


@pytest.mark.parametrize(
    ("found", "recall"),
    [
        ([[1, 2, 3], [0, INF, INF]], 1.0),
        ([[3, 3, 3], [0, INF, INF]], 1.0),  # equally near as the furthest true one
        ([[1, 2, 4], [0, INF, INF]], 0.75),
        ([[1, INF, INF], [9, INF, INF]], 0.25),
    ],
)
def test_what_is_near_enough_counts(found, recall):
    true = np.array([[1, 2, 3], [0, INF, INF]], np.float32)
    assert recall_at_k(np.array(found, np.float32), true, 1e-6) == recall


def test_without_true_neighbours_there_is_no_recall():
    nothing = np.full((2, 3), INF, np.float32)
    assert recall_at_k(nothing, nothing, 1e-6) is None
