"""A language model and tokens in, entries out: a key, the token that came next, and the place it comes from."""

from spalm.memory.encoder import Encoder, MemorySettings, encoder_of
from spalm.memory.entries import MISSING, Entries, EntrySource, LiveDocuments
from spalm.memory.memory import Memory, MemoryVersion, describe_memory, is_memory
from spalm.memory.projection import Projection, principal_axes
from spalm.memory.remember import open_memory, remember, source_of_split, source_of_text

__all__ = [
    "Encoder",
    "Entries",
    "EntrySource",
    "LiveDocuments",
    "MISSING",
    "Memory",
    "MemorySettings",
    "MemoryVersion",
    "Projection",
    "describe_memory",
    "encoder_of",
    "is_memory",
    "open_memory",
    "principal_axes",
    "remember",
    "source_of_split",
    "source_of_text",
]
