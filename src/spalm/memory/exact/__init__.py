"""Documents of a memory in, places where a text stands word for word in them out, and what followed there."""

from spalm.memory.exact.index import ExactIndex
from spalm.memory.exact.matches import LONGEST, Excluded, Matches, reversed_context, reversed_contexts

__all__ = ["LONGEST", "ExactIndex", "Excluded", "Matches", "reversed_context", "reversed_contexts"]
