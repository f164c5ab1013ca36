"""The form of a packed memory: a tar of files whose bytes follow from their content alone.

    SHA256SUMS           digests of the other members, as in every folder that spalm makes
    content/...          the files, in the order of their names

It is not compressed. Each member is a regular file with a header of one block, without an owner and a time. The names
are those that a memory, or a model with a memory, has; there is none for code, for pickled weights, or for an index of
nearest contexts, which libraries of others would parse. `tar xf` and `sha256sum --check` read it too.
"""

import re
import tarfile
from pathlib import PurePosixPath
from typing import BinaryIO

from spalm.attachment import ATTACHED_FILE
from spalm.digests import KNOWN, SUMS
from spalm.memory.memory import IDENTITY

CONTENT = "content"
"""Folder of the archive that holds the files."""
HEADER_BYTES = tarfile.BLOCKSIZE
"""Number of bytes of a header. The length of a member is made a multiple of it."""
END = bytes(2 * HEADER_BYTES)
"""Bytes with which an archive ends."""
AT_ONCE = 1 << 20
"""Number of bytes that are copied at a time."""
LISTED_FOLDERS = ("corpus", "combiner")
"""Folders of a model with a memory that are packed whole, besides the memory."""
MODEL_FOLDER = "model"
"""Folder of a copy of the base model."""
_LONGEST_NAME = 100
"""Highest number of bytes of a member's name: what the header has room for."""
_ENDINGS = "json|jsonl|jinja|txt|model|safetensors|tokens|documents|names"
_FILE = rf"(?:{SUMS}|\w[\w.+-]*\.(?:{_ENDINGS}))"
_IN_MEMORY = (
    rf"(?:{re.escape(IDENTITY)}|projection|catalogue\.(?:sqlite|sha256)|shards/[0-9]{{1,18}}\.(?:keys|tokens)"
    rf"|exact/(?:shards\.json|[0-9]{{1,18}}/(?:{SUMS}|\w+(?:\.json)?)))"
)
_FOLDERS = "|".join([*LISTED_FOLDERS, MODEL_FOLDER])
_NAMES = re.compile(rf"{CONTENT}/(?:{_IN_MEMORY}|{_FILE}|(?:{_FOLDERS})/{_FILE}|memory/{_IN_MEMORY})", re.ASCII)
"""Names of the members that an archive may have, besides the list of digests."""
MARKS = (f"{CONTENT}/{ATTACHED_FILE}", f"{CONTENT}/{IDENTITY}")
"""Members of which every archive has exactly one: they say what it is."""


def is_member_name(name: str) -> bool:
    """Returns whether a file of an archive may have this name."""
    path = PurePosixPath(name)
    return len(name) <= _LONGEST_NAME and path.name != KNOWN and _NAMES.fullmatch(name) is not None


def header(name: str, size: int) -> bytes:
    """Returns the header of a member: the only one that a member of this name and size may have."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def padding(size: int) -> int:
    """Returns the number of zeros that follow a member of this size."""
    return -size % HEADER_BYTES


def read_exactly(file: BinaryIO, size: int) -> bytes | None:
    """Returns so many bytes of a file, None if there are fewer."""
    content = file.read(size)
    return content if len(content) == size else None
