"""Files on disk, whoever made them: read only if they are regular and of bounded size, written in one step.

A file is written under a name that nobody can guess and that must not exist, then renamed: neither a symbolic link in
a foreign folder nor a crash in the middle can change anything but the file itself.
"""

import io
import json
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pydantic

from spalm.errors import DamagedError, InputError

TEMPORARY = ".tmp"
"""End of the names of files that are being written."""
_LEFTOVER = re.compile(r"(.+?)(\.[0-9a-f]{8,16})?" + re.escape(TEMPORARY))
"""Name of a file that is being written, or was when a process was killed: NAME.RANDOM.tmp."""
MOST_TEXT = 1 << 30
"""Largest number of bytes of a file that is read as a whole."""
_LONGEST_NAME = 255
_DEEPEST = 100
"""Highest number of folders within one another; what we make has a handful."""
_HOLE_BYTES, _HOLE_SHARE = 1 << 30, 64
"""Size from which on a file is looked at for holes, and how many times larger than its space on the disk it may be."""
_STAGES = ("manifest.json", "memory.json", "index.json")
"""Files that make a folder a stage, a memory or an index."""
_MANY_FILES = 1 << 20
"""Number of open files that stands for no limit."""


def is_plain_name(name: Any) -> bool:
    """Returns whether a name is that of a file in a folder itself: not a path, not the folder or the one above it."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(sign in name for sign in "/\\\0\n")
        and len(os.fsencode(name)) <= _LONGEST_NAME
    )


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a file for reading its bytes; refuses devices, pipes and folders, which could block or never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path} is not a regular file; put a file there")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(handle, "rb")


def refuse_hole(path: Path) -> None:
    """Raises an error if a file is mostly a hole: it takes no space and hours to read."""
    found = path.stat()
    if found.st_size < _HOLE_BYTES or _HOLE_SHARE * 512 * found.st_blocks > found.st_size:
        return
    with open_regular(path) as file:  # some file systems do not say how much space a file takes
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) < found.st_size:
            raise DamagedError(f"{path} has {found.st_size:,} bytes, of which hardly any are there; remove it")


def read_text(path: Path, most: int = MOST_TEXT, *, remedy: str = "make it again") -> str:
    """Returns the text of a file of at most `most` bytes, which is UTF-8 whatever the locale."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DamagedError(f"{path} has more than {most:,} bytes; {remedy}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path} is damaged (byte {error.start:,} is not UTF-8); {remedy}") from None


def read_json(path: Path, form: Any = Any, *, remedy: str = "make it again") -> Any:
    """Returns the value in a JSON file; refuses what is not of the type `form`, naming the file and the remedy."""
    try:
        return validated(json.loads(read_text(path, remedy=remedy)), form, path, remedy=remedy)
    except RecursionError:
        raise DamagedError(f"{path} is damaged (nested too deeply); {remedy}") from None
    except json.JSONDecodeError as error:
        raise DamagedError(f"{path} is damaged (no JSON at character {error.pos:,}); {remedy}") from None
    except InputError:
        raise
    except ValueError:  # a number with thousands of digits
        raise DamagedError(f"{path} is damaged (a number is too long); {remedy}") from None


def validated(value: Any, form: Any, where: Path, *, remedy: str) -> Any:
    """Returns a value as the type `form`, which pydantic knows; a value of another form is damage of the file."""
    if form is Any:
        return value
    try:
        return _adapter(form).validate_python(value)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))[:100]
        reason = problem["msg"].removeprefix("Value error, ")
        raise DamagedError(f"{where} is damaged ({f'{place}: ' if place else ''}{reason}); {remedy}") from None


@lru_cache
def _adapter(form: Any) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(form)


@contextmanager
def replacing(path: Path, *, sync: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yields the path of a new, empty file to be written, which then takes the place of `path` in one step.

    A crash leaves the old file or the new one, nothing between; what earlier crashes left is removed. Where several
    processes may write the same file at once, it is `shared`, and nothing is removed. Scratch files need no `sync` to
    the disk. The file can be read by whom the umask says, whatever a library that writes it thinks.
    """
    if not shared:
        remove_leftovers(path.parent, path.name)
    temporary = temporary_beside(path)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield temporary
        temporary.chmod(mode)
        if sync:
            sync_to_disk(temporary)
        temporary.replace(path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_to_disk(path.parent)  # a power cut must not undo the renaming


def allow_as_umask_says(paths: Iterable[Path]) -> None:
    """Lets files that a library wrote be read by whom the umask says."""
    for path in paths:
        with replacing(path) as copy:
            path.replace(copy)


def write_atomically(path: Path, content: bytes | str, *, sync: bool = True, shared: bool = False) -> None:
    """Puts `content` at `path` in one step (see `replacing`); text becomes UTF-8."""
    with replacing(path, sync=sync, shared=shared) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one step."""
    write_atomically(path, as_json(value))


def as_json(value: Any) -> str:
    """Returns a value as the text of a JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def temporary_beside(path: Path) -> Path:
    """Returns a path in the same folder under a name that nobody can guess, for what will be renamed to `path`."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the list of files of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes left of a file or folder that they were writing, or of all in a folder."""
    for path in folder.iterdir():
        found = _LEFTOVER.fullmatch(path.name)
        if not found or name not in (None, found[1]):
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif found[2]:  # a folder without a random name is not ours
            shutil.rmtree(path)


def is_leftover(name: str) -> bool:
    """Returns whether a name is that of a file that was being written."""
    return _LEFTOVER.fullmatch(name) is not None


def refuse_links_out_of(folder: Path, but_for: Callable[[Path], bool] = lambda _: False) -> None:
    """Raises an error if a symbolic link anywhere in a folder leads out of it: what is written there is elsewhere.

    Links for which `but_for` returns true may lead anywhere.
    """
    for entry in entries_below(folder):
        path = Path(entry.path)
        if entry.is_symlink() and not is_inside(path, folder) and not but_for(path):
            raise InputError(
                f"{path} is a symbolic link that leads out of {folder}; put what it leads to in its place, or remove it"
            )


def holds_stage(folder: Path) -> bool:
    """Returns whether a folder, which may be a link to one, is a whole stage, memory or index."""
    return any((folder / name).is_file() for name in _STAGES)


def is_inside(path: Path, folder: Path) -> bool:
    """Returns whether a path is in a folder once links are followed; one that leads to itself is nowhere."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (RuntimeError, OSError):  # Python 3.11 and 3.12 raise the first for a loop
        return False


def entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields everything in a folder and in the folders inside it, without following links; refuses endless nesting."""
    waiting = [(str(folder), 0)]
    while waiting:
        inner, depth = waiting.pop()
        if depth > _DEEPEST:
            raise InputError(f"{folder} has more than {_DEEPEST} folders within one another; remove them")
        with os.scandir(inner) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))


def own_folder(directory: Path, *names: str) -> Path:
    """Returns a folder in a directory, made if it is missing; refuses one that a symbolic link puts elsewhere."""
    folder = directory.joinpath(*names)
    if not is_inside(folder, directory):
        raise InputError(f"{folder} leads out of {directory} by a symbolic link; remove the link")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def child(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder; refuses names that are paths, and links that lead out of the folder."""
    path = folder / name
    if not is_plain_name(name):
        raise DamagedError(f"{folder} names a file {name[:100]!r}, which is not in it; make it again")
    if path.is_symlink() and not is_inside(path, folder):
        raise InputError(f"{path} is a symbolic link that leads out of {folder}; put the file itself there")
    return path


def most_open_files() -> int:
    """Returns how many files this process may have open at a time."""
    found, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY_FILES if found == resource.RLIM_INFINITY else found
