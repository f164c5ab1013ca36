"""Documents of a memory in, places where a text stands word for word in them out, and what followed there."""

from spalm.memory.exact.index import ExactIndex
from spalm.memory.exact.matches import (
    LEAST_COUNTS,
    LONGEST,
    OCCURRENCES,
    Excluded,
    Matches,
    last_contexts,
    reversed_context,
    reversed_contexts,
)
from spalm.memory.exact.suffixes import BORDER
from spalm.memory.exact.trace import LEAST, NO_DOCUMENTS, VerbatimSpan
from spalm.memory.exact.view import ExactView

__all__ = [
    "BORDER",
    "LEAST",
    "LEAST_COUNTS",
    "LONGEST",
    "NO_DOCUMENTS",
    "OCCURRENCES",
    "ExactIndex",
    "ExactView",
    "Excluded",
    "Matches",
    "VerbatimSpan",
    "last_contexts",
    "reversed_context",
    "reversed_contexts",
]
