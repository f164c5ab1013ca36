"""Recall: the share of the true nearest neighbours that a search has found."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

_RELATIVE_SLACK = 1e-4
"""Relative difference up to which two squared distances count as the same."""


@dataclass(frozen=True)
class Tolerance:
    """Differences up to which two squared distances count as the same; the defaults are for keys of a memory."""

    relative: float = _RELATIVE_SLACK
    """Relative difference."""
    absolute: float = 1e-4
    """Absolute difference."""


HALF_PRECISION = Tolerance()
"""Tolerance for keys of a memory."""


def recall_at_k(
    found: Float[np.ndarray, "queries k"],
    true: Float[np.ndarray, "queries k"],
    slack: float,
    *,
    relative: float = _RELATIVE_SLACK,
) -> float | None:
    """Returns the share of true neighbours that were found, judged by squared distance; None if there are none.

    Both arrays hold squared distances, infinite where there is no neighbour. A neighbour counts as found if it is no
    further away than the furthest true one, up to rounding (`slack`, absolute, and `relative`). So it does not matter
    which of several equally near entries is found.
    """
    exist = np.isfinite(true)
    if not exist.any():
        return None
    furthest = np.where(exist, true, 0).max(1, keepdims=True)
    near_enough = found <= furthest * (1 + relative) + slack
    return float((near_enough & exist).sum() / exist.sum())
