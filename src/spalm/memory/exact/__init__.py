"""Documents of a memory in, places where a text stands word for word in them out, and what followed there."""

from spalm.memory.exact.index import ExactIndex
from spalm.memory.exact.matches import (
    LEAST_COUNTS,
    LONGEST,
    OCCURRENCES,
    Excluded,
    Matches,
    reversed_context,
    reversed_contexts,
)

__all__ = [
    "LEAST_COUNTS",
    "LONGEST",
    "OCCURRENCES",
    "ExactIndex",
    "Excluded",
    "Matches",
    "reversed_context",
    "reversed_contexts",
]
