"""A language model and tokens in, entries out: a key, the token that came next, and the place it comes from."""

from spalm.memory.encoder import Encoder, MemorySettings, encoder_of
from spalm.memory.entries import (
    MISSING,
    Entries,
    EntryLookup,
    EntrySource,
    LiveDocuments,
    divided_id,
    divided_ids,
    joined_ids,
)
from spalm.memory.memory import Memory, MemoryVersion, describe_memory, is_memory
from spalm.memory.projection import Projection, principal_axes
from spalm.memory.remember import open_memory, remember, source_of_split, source_of_text

__all__ = [
    "Encoder",
    "Entries",
    "EntryLookup",
    "EntrySource",
    "LiveDocuments",
    "MISSING",
    "Memory",
    "MemorySettings",
    "MemoryVersion",
    "Projection",
    "describe_memory",
    "divided_id",
    "divided_ids",
    "encoder_of",
    "is_memory",
    "joined_ids",
    "open_memory",
    "principal_axes",
    "remember",
    "source_of_split",
    "source_of_text",
]
