"""Unpacking: a file that `spalm pack` wrote, or that somebody made to harm, becomes a directory, or nothing.

All headers are checked before anything is written. The files go into a new folder beside the directory, which gets its
name when every digest is right; what a kill leaves of such a folder is removed by the next attempt.
"""

import hashlib
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from spalm.attachment import is_attached
from spalm.attachment.attached import read_description, set_base
from spalm.digests import SUMS, sums_from_text
from spalm.errors import DamagedError, InputError
from spalm.files import (
    MOST_TEXT,
    entries_below,
    open_regular,
    refuse_hole,
    remove_leftovers,
    sync_to_disk,
    temporary_beside,
)
from spalm.lm.pretrained import PretrainedFolder
from spalm.maintenance.archive import (
    AT_ONCE,
    CONTENT,
    END,
    HEADER_BYTES,
    MARKS,
    header,
    is_member_name,
    padding,
    read_exactly,
)

_MOST_MEMBERS = 1 << 20
"""Highest number of members of an archive."""
_AGAIN = "get it again from where it came from"
"""Remedy of a file that is not as it was packed."""


@dataclass(frozen=True)
class _Member:
    """A file in the archive."""

    name: str
    begin: int
    """Place of its first byte in the archive."""
    size: int


def unpack(file: Path, directory: Path, *, model: Path | None = None) -> Path | None:
    """Makes a new directory of what `spalm pack` wrote into a file.

    `model` is the folder of the base model, if that lies elsewhere than where the memory was attached; another model is
    refused. Returns the place at which the base model is still missing; None if it is there, or if there is none.
    """
    if os.path.lexists(directory):
        raise InputError(f"{directory} exists; give a new folder")
    directory.parent.mkdir(parents=True, exist_ok=True)
    refuse_hole(file)
    with open_regular(file) as archive:
        members = _read_headers(archive, file)
        digests = _read_digests(archive, file, members)
        _refuse_without_room(directory.parent, sum(member.size for member in members))
        remove_leftovers(directory.parent, directory.name)
        half = temporary_beside(directory)
        try:
            half.mkdir()
            for member in members[1:]:
                if _extract(archive, member, half / member.name.removeprefix(f"{CONTENT}/")) != digests[member.name]:
                    raise DamagedError(f"{file} is damaged (the digest of {member.name} differs); {_AGAIN}")
            _use_model(half, model)
            missing = _missing_base(half, directory)
            for entry in entries_below(half):
                if entry.is_dir(follow_symlinks=False):
                    sync_to_disk(Path(entry.path))
            sync_to_disk(half)
            half.rename(directory)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise
    sync_to_disk(directory.parent)
    return missing


def _read_headers(archive: BinaryIO, file: Path) -> list[_Member]:
    """Returns the members of an archive; refuses one that has any that `spalm pack` would not have written."""
    size, members = os.fstat(archive.fileno()).st_size, list[_Member]()
    while (block := read_exactly(archive, HEADER_BYTES)) is not None and any(block):
        name, length = _read_header(block, file)
        member = _Member(name, archive.tell(), length)
        if member.begin + length + padding(length) > size:
            raise DamagedError(f"{file} is cut short (in {name}); {_AGAIN}")
        if not is_member_name(name) and (members or name != SUMS):
            raise InputError(f"{file} holds {name[:200]!r}, which a packed memory cannot have; it is not unpacked")
        if (members and name <= members[-1].name) or len(members) == _MOST_MEMBERS:
            raise InputError(f"{file} is not as `spalm pack` writes it (at {name[:200]!r}); it is not unpacked")
        members.append(member)
        archive.seek(member.begin + length)
        if any(read_exactly(archive, padding(length)) or b""):
            raise InputError(f"{file} holds something between its members (after {name!r}); it is not unpacked")
    if block is None or block + archive.read(HEADER_BYTES + 1) != END:
        raise DamagedError(f"{file} does not end as `spalm pack` ends it; {_AGAIN}")
    if not members or members[0].name != SUMS or sum(member.name in MARKS for member in members) != 1:
        raise InputError(f"{file} is no packed memory; give a file that `spalm pack` wrote")
    return members


def _read_header(block: bytes, file: Path) -> tuple[str, int]:
    """Returns name and size of a member; refuses all but regular files, with the header that they get when packed."""
    try:
        found = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeError):
        raise InputError(f"{file} is no file that `spalm pack` wrote, or is damaged; {_AGAIN}") from None
    if not found.isreg() or found.size < 0 or len(found.name) > HEADER_BYTES or block != header(found.name, found.size):
        raise InputError(f"{file} is not as `spalm pack` writes it (at {found.name[:200]!r}); it is not unpacked")
    return found.name, found.size


def _read_digests(archive: BinaryIO, file: Path, members: list[_Member]) -> dict[str, str]:
    """Returns the digests of all members but the list itself; refuses a list of others."""
    first = members[0]
    if first.size > MOST_TEXT:
        raise InputError(f"{file}: its list of digests has {first.size:,} bytes; it is not unpacked")
    archive.seek(first.begin)
    digests = sums_from_text(archive.read(first.size).decode("ascii", "replace"))
    if digests is None:
        raise DamagedError(f"{file} is damaged (its list of digests is not as it was written); {_AGAIN}")
    if digests.keys() != {member.name for member in members[1:]}:
        raise DamagedError(f"{file} holds other files than its list of digests; {_AGAIN}")
    return digests


def _refuse_without_room(folder: Path, size: int) -> None:
    """Raises an error unless the disk has room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise InputError(f"unpacked it has {size:,} bytes, {folder} has room for {free:,}; make room there")


def _extract(archive: BinaryIO, member: _Member, path: Path) -> str:
    """Writes a member to a new file and returns its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    archive.seek(member.begin)
    hashed, left = hashlib.sha256(), member.size
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb") as sink:
        while left and (block := archive.read(min(left, AT_ONCE))):
            hashed.update(block)
            sink.write(block)
            left -= len(block)
        sink.flush()
        os.fsync(sink.fileno())
    return hashed.hexdigest()


def _use_model(directory: Path, model: Path | None) -> None:
    """Notes where the base model lies, if it was said."""
    if model is None:
        return
    if not is_attached(directory):
        raise InputError(f"--model {model}: the file holds a memory alone, without a model; leave it out")
    if not (model / "config.json").is_file():
        raise InputError(f"--model {model}: there is no model (no config.json); give the folder of the base model")
    set_base(directory, PretrainedFolder(model))


def _missing_base(half: Path, directory: Path) -> Path | None:
    """Returns where the base model is to be once `half` is `directory`; None if it is there, or there is none."""
    if not is_attached(half):
        return None
    base = read_description(half)[0]
    if base.is_dir():
        return None
    return directory / base.relative_to(half) if base.is_relative_to(half) else base
