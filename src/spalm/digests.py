"""Digests: of files, of values, and of all files of a folder in the form of `sha256sum`.

    FOLDER/SHA256SUMS     a line for each file, then a line with the digest of those before it

`sha256sum --check SHA256SUMS` reads it too.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from spalm.errors import DamagedError, InputError
from spalm.files import (
    MOST_TEXT,
    as_json,
    child,
    is_plain_name,
    open_regular,
    read_json,
    read_text,
    refuse_hole,
    write_atomically,
    write_json,
)

SUMS = "SHA256SUMS"
"""File that holds the digests of the files of a folder."""
KNOWN = "known-digests.json"
"""File that holds the digests of large files, so that these need not be read again."""
_DESCRIPTIONS = (".json", ".jsonl", ".yaml")
"""Ends of the names of files that are read as a whole."""
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")
_LAST = re.compile(r"# sha256 of the lines above: ([0-9a-f]{64})\n\Z")


def digest_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_own_file(path: Path) -> str:
    """Returns the SHA-256 of a file of a folder that somebody else may have made.

    A description longer than any that can be read is refused, and so is a hole that takes no space and hours to read.
    """
    if path.suffix in _DESCRIPTIONS and path.stat().st_size > MOST_TEXT:
        raise DamagedError(f"{path} has more than {MOST_TEXT:,} bytes; make {path.parent} again")
    refuse_hole(path)
    return digest_of_file(path)


def digest_of_text(text: str) -> str:
    """Returns the SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_json(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its keys."""
    return digest_of_text(json.dumps(value, sort_keys=True))


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the digests of the files of a folder."""
    assert all(map(is_plain_name, digests))
    write_atomically(folder / SUMS, sums_as_text(digests))


def sums_as_text(digests: Mapping[str, str]) -> str:
    """Returns digests by name as the text of a list of them."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return f"{lines}# sha256 of the lines above: {digest_of_text(lines)}\n"


def sums_from_text(text: str) -> dict[str, str] | None:
    """Returns the digests that a list holds, by name; None if the list is damaged."""
    last = _LAST.search(text)
    lines = text[: last.start()] if last else ""
    found = {name: digest for digest, name in _LINE.findall(lines)}
    whole = "".join(f"{digest}  {name}\n" for name, digest in found.items()) == lines
    return found if last is not None and whole and digest_of_text(lines) == last[1] else None


def sum_up(folder: Path, names: Iterable[str]) -> None:
    """Writes the digests of these files of a folder, as they are at this moment."""
    write_sums(folder, {name: digest_of_file(folder / name) for name in names})


def read_sums(folder: Path) -> dict[str, str] | None:
    """Returns the digests of the files of a folder by name; None if there are none, as in what older versions made."""
    path = folder / SUMS
    if not path.exists() and not path.is_symlink():
        return None
    found = sums_from_text(read_text(child(folder, SUMS)))
    if found is None:
        raise DamagedError(f"{path} is damaged, so what it lists cannot be checked; restore it, or make {folder} again")
    return found


@contextmanager
def updating_sums(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Updates the list of digests of a folder in which these files are written meanwhile.

    Until they are written they are not in the list, so that a kill does not look like damage.
    """
    try:
        others = {name: digest for name, digest in (read_sums(folder) or {}).items() if name not in {*names}}
    except DamagedError:
        others = {}
    if (folder / SUMS).exists():
        write_sums(folder, others)
    yield
    write_sums(folder, {**others, **{name: digest_of_file(folder / name) for name in names}})


def refuse_changed(folder: Path, names: Iterable[str], remedy: str) -> None:
    """Raises an error unless these files of a folder have the digests of its list, where there is one."""
    sums = read_sums(folder) or {}
    for name in names:
        if name in sums and digest_of_own_file(child(folder, name)) != sums[name]:
            raise DamagedError(f"{folder / name} is damaged (its digest differs); {remedy}")


class _KnownFile(TypedDict):
    """The form of the file."""

    files: dict[str, list[Any]]
    sha256: str


class KnownDigests:
    """Digests of large files, which are not computed again while a file has the size and the times that it had.

    They are kept in a file. One that is missing, damaged or of another machine only means that files are read again.
    """

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, list[Any]] = {}
        with suppress(InputError):
            self._known = self.read() if path.exists() else {}

    def read(self) -> dict[str, list[Any]]:
        """Returns what the file holds; refuses a damaged one."""
        content = read_json(self._path, _KnownFile, remedy=f"remove {self._path}")
        if content["sha256"] != digest_of_json(content["files"]) or as_json(content) != read_text(self._path):
            raise DamagedError(f"{self._path} is damaged; remove it")
        return content["files"]

    def of(self, path: Path) -> str:
        """Returns the digest of a file; reads the file if it changed since it was last read, or never was."""
        stamp = _stamp(path)
        known = self._known.get(path.name)
        if isinstance(known, list) and known[:-1] == stamp:
            return str(known[-1])
        digest = digest_of_own_file(path)
        self._known[path.name] = [*stamp, digest]
        self._save()
        return digest

    def _save(self) -> None:
        """Writes what is known; where nothing can be written, the files are read again next time."""
        with suppress(OSError):  # of a folder that cannot be written
            write_json(self._path, {"files": self._known, "sha256": digest_of_json(self._known)})


def _stamp(path: Path) -> list[int]:
    """Returns the size of a file, and the times at which its content and its entry last changed."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
