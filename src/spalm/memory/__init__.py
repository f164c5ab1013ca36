"""A language model and tokens in, entries out: key, next token, source. Remembered, forgotten, compacted, verified."""

from spalm.memory.encoder import Encoder, MemorySettings, encoder_of
from spalm.memory.entries import MISSING, Documents, Entries, EntrySource
from spalm.memory.projection import Projection, principal_axes
from spalm.memory.remember import open_memory, remember, source_of_split, source_of_text
from spalm.memory.store import Memory, Version, describe, is_memory

__all__ = [
    "Documents",
    "Encoder",
    "Entries",
    "EntrySource",
    "MISSING",
    "Memory",
    "MemorySettings",
    "Projection",
    "Version",
    "describe",
    "encoder_of",
    "is_memory",
    "open_memory",
    "principal_axes",
    "remember",
    "source_of_split",
    "source_of_text",
]
