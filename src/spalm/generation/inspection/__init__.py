"""A passage in, every model's predictions out: token by token, with neighbours that can be switched off."""

from spalm.generation.inspection.explain import ExplainedPosition, explain_position, explain_tokens
from spalm.generation.inspection.explorer import Explorer
from spalm.generation.inspection.passages import LONGEST_PASSAGE, CorpusPassage, Passage, PassageReader, Switches

__all__ = [
    "LONGEST_PASSAGE",
    "CorpusPassage",
    "ExplainedPosition",
    "Explorer",
    "Passage",
    "PassageReader",
    "Switches",
    "explain_position",
    "explain_tokens",
]
