"""Memories of one base model in, what those that are chosen for an answer have for it out, as if they were one."""

from spalm.generation.memories.added import AddedMemory, open_added_memory
from spalm.generation.memories.joined import JoinedEntries
from spalm.generation.memories.open_memories import MemoryFolders, OpenMemories, UnknownMemory, named_folders
from spalm.generation.memories.selection import MemorySelection
from spalm.generation.memories.usable import UsableMemory

__all__ = [
    "AddedMemory",
    "JoinedEntries",
    "MemoryFolders",
    "MemorySelection",
    "OpenMemories",
    "UnknownMemory",
    "UsableMemory",
    "named_folders",
    "open_added_memory",
]
