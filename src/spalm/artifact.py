"""Artifacts: what stages make and read, each a directory that describes itself.

    DIR/manifest.json     what it is, its settings, its parents' digests, its files with size, dtype, shape and digest
    DIR/...               the files

The manifest is written last and in one step, so a directory with a manifest is complete. A directory that is still
being made holds `unfinished.json` instead, which says what it will be: work resumes only where it is the same work.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import spalm
from spalm.console import say
from spalm.errors import InputError, InUseError
from spalm.settings import differences

MANIFEST = "manifest.json"
"""File that describes a finished artifact."""
UNFINISHED = "unfinished.json"
"""File that describes an artifact that is being made."""
SCRATCH = "scratch.json"
"""File that lists the scratch files and folders, which are removed once the artifact is complete."""
PREVIOUS = ".previous"
"""End of the name of an artifact that was set aside, before a number if there are several."""
TEMPORARY = ".tmp"
"""End of the names of files that are being written."""


class Artifact:
    """A finished artifact, opened for reading. Opening checks that every file is there with its full size."""

    def __init__(self, directory: Path | str, kind: str | None = None):
        self.directory = Path(directory)
        path = self.directory / MANIFEST
        if not path.exists():
            state = "is unfinished: run the same command again" if self.directory.exists() else "does not exist"
            raise InputError(f"{self.directory} {state} (no {MANIFEST})")
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text())
            self.kind, self.settings, self.facts = (self.manifest[key] for key in ("kind", "settings", "facts"))
            files: dict[str, dict[str, Any]] = dict(self.manifest["files"])
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} is damaged; remove {self.directory} and make it again") from None
        if kind is not None and self.kind != kind:
            raise InputError(f"{self.directory} holds a {self.kind}, a {kind} is needed; give another directory")
        for name, entry in files.items():
            size = (self.directory / name).stat().st_size if (self.directory / name).exists() else None
            if size != entry["bytes"]:
                found = "is missing" if size is None else f"has {size:,} bytes, its manifest says {entry['bytes']:,}"
                raise InputError(f"{self.directory / name} {found}; remove {self.directory} and make it again")

    @property
    def identity(self) -> dict[str, Any]:
        """Description of what the artifact is: kind, version, settings and parents."""
        return {key: self.manifest[key] for key in ("kind", "version", "settings", "parents")}

    @property
    def digest(self) -> str:
        """Digest of everything in the artifact: the manifest holds the digest of each file."""
        return digest_of_json(self.manifest)

    def array(self, name: str) -> np.ndarray:
        """Returns the array called `name`, memory-mapped and read-only."""
        entry = self.manifest["files"][name]
        shape = tuple(entry["shape"])
        if not all(shape):
            return np.zeros(shape, entry["dtype"])
        return np.memmap(self.directory / name, dtype=entry["dtype"], mode="r", shape=shape)

    def verify(self) -> None:
        """Reads every byte and compares it with the digests of the manifest."""
        for name, entry in self.manifest["files"].items():
            if digest_of_file(self.directory / name) != entry["sha256"]:
                raise InputError(f"{self.directory / name} is damaged (its digest differs); make it again")


def digest_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_json(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_atomically(path: Path, content: bytes | str, *, mark: str = "", sync: bool = True) -> None:
    """Puts `content` at `path` in one step: a crash leaves the old file or the new one, nothing between.

    Where several processes may write the same file at once, each gives a `mark` of its own. Scratch files need no
    `sync` to the disk.
    """
    temporary = path.with_name(path.name + mark + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one step."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file."""
    return json.loads(path.read_text())


class Draft:
    """An artifact that is being made: files are written below `directory`, and arrays among them are declared."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._arrays: dict[str, dict[str, Any]] = {}

    def declare(self, name: str, dtype: np.dtype | str, shape: tuple[int, ...]) -> None:
        """Declares the file `name` to be a raw little-endian array of this type and shape."""
        self._arrays[name] = {"dtype": np.dtype(dtype).newbyteorder("<").str, "shape": list(shape)}

    def scratch(self, name: str) -> Path:
        """Returns the path of a file or folder that is removed once the artifact is complete, and not before."""
        named = _scratch_of(self.directory)
        if name not in named:
            write_json(self.directory / SCRATCH, [*named, name])
        return self.directory / name

    def write_array(self, name: str, array: np.ndarray) -> None:
        """Writes an array to the file `name` and declares it."""
        self.declare(name, array.dtype, array.shape)
        write_atomically(self.directory / name, array.astype(self._arrays[name]["dtype"], copy=False).tobytes())

    def finish(self, identity: Mapping[str, Any], facts: Mapping[str, Any], files: list[str]) -> None:
        """Writes the manifest, which lists every array and the other `files`, and removes the scratch files."""
        entries = {}
        for name in sorted({*files, *self._arrays}):
            path = self.directory / name
            entries[name] = {
                "bytes": path.stat().st_size,
                "sha256": digest_of_file(path),
                **self._arrays.get(name, {}),
            }
        write_json(
            self.directory / MANIFEST,
            {**identity, "facts": dict(facts), "files": entries, "spalm": spalm.__version__},
        )
        (self.directory / UNFINISHED).unlink()
        _tidy(self.directory)


Fill = Callable[[Draft], tuple[dict[str, Any], list[str]]]
"""Function that fills a draft. It returns facts for the manifest, and the names of the files that are not arrays."""


@dataclass(frozen=True)
class Stage:
    """Description of the artifact to make: its kind, its settings, and the digests of what it is made from."""

    kind: str
    """Kind of artifact."""
    version: int
    """Version of the files' format."""
    settings: Mapping[str, Any]
    """Settings that decide what is in the files."""
    parents: Mapping[str, str]
    """Digests of what the artifact is made from, by name."""
    cheap: bool = False
    """Whether unfinished work with other settings is removed instead of refused."""

    @property
    def identity(self) -> dict[str, Any]:
        """Description by which an existing artifact is recognised: kind, version, settings and parents."""
        settings, parents = dict(self.settings), dict(self.parents)
        return {"kind": self.kind, "version": self.version, "settings": settings, "parents": parents}

    def make(self, directory: Path, fill: Fill, *, restart: bool = False) -> Artifact:
        """Returns the artifact at `directory`; makes it unless it is there already with the same identity.

        A finished one with another identity is kept as `NAME.previous`, and put back if the new one is refused. An
        unfinished one is continued; if it was to become something else, it is begun again where the stage is `cheap`,
        and refused otherwise. With `restart`, unfinished work is begun again in any case.
        """
        directory.mkdir(parents=True, exist_ok=True)
        changed: list[str] = []
        with only_writer(directory):
            if (directory / MANIFEST).exists():
                present = Artifact(directory)
                changed = differences(present.identity, self.identity)
                if not changed:
                    _tidy(directory)  # scratch files of a run that was killed at the very end
                    say(f"{directory}: finished before, unchanged")
                    return present
        previous = set_aside(directory, changed) if (directory / MANIFEST).exists() else None
        directory.mkdir(exist_ok=True)
        try:
            with only_writer(directory):
                self._claim(directory, restart=restart)
                draft = Draft(directory)
                facts, files = fill(draft)
                draft.finish(self.identity, facts, files)
        except Exception as error:
            refused = self.cheap and isinstance(error, InputError)
            if previous is not None and (refused or _is_empty(directory)):
                _put_back(previous, directory)
            raise
        return Artifact(directory)

    def _claim(self, directory: Path, *, restart: bool) -> None:
        """Marks the directory as this stage's work in progress, and removes other unfinished work if that is allowed.

        Raises an error if the directory holds other unfinished work of a stage that is not `cheap`, or foreign files.
        """
        marker = directory / UNFINISHED
        if marker.exists() and not restart:
            changed = differences(json.loads(marker.read_text()), self.identity)
            if not changed:
                return
            if not self.cheap:
                raise InputError(
                    f"{directory} holds unfinished work with other settings ({changed[0]}); "
                    "go back to them, choose another --out, or give --restart to begin again"
                )
        ours = {name + end for name in (UNFINISHED, SCRATCH) for end in ("", TEMPORARY)}
        others = [path for path in directory.iterdir() if path.name not in ours]
        if others and not marker.exists():
            raise InputError(f"{directory} holds files that are not ours ({others[0].name}); choose another --out")
        for path in others:
            _remove(path)
        write_json(marker, self.identity)


def _scratch_of(directory: Path) -> list[str]:
    """Returns the names of the scratch files and folders that a directory lists."""
    path = directory / SCRATCH
    return read_json(path) if path.exists() else []


def _tidy(directory: Path) -> None:
    """Removes the scratch files and folders of a directory, then the list that names them."""
    for name in _scratch_of(directory):
        _remove(directory / name)
    (directory / SCRATCH).unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Removes a file, if it is there, or a folder with all that is in it."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def set_aside(directory: Path, changed: list[str]) -> Path:
    """Renames `directory` to NAME.previous, or NAME.previous-2 and so on, and prints why. Returns the new path."""
    names = (f"{directory.name}{PREVIOUS}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    previous = next(path for path in map(directory.with_name, names) if not os.path.lexists(path))
    directory.rename(previous)
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    say(f"{directory}: {changed[0]}{more}; made again, the old one is kept as {previous.name}")
    return previous


def _put_back(previous: Path, directory: Path) -> None:
    """Gives what was set aside its place again."""
    shutil.rmtree(directory)
    previous.rename(directory)
    say(f"{directory}: nothing was made; the old one is in its place again")


def _is_empty(directory: Path) -> bool:
    """Returns whether nothing has been made in a directory that a stage has claimed."""
    return {path.name for path in directory.iterdir()} <= {UNFINISHED, SCRATCH}


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Locks the directory for this process. A second writer is refused at once; a crash releases the lock."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InUseError(
            f"{directory} is being written by another process; wait for it or choose another --out"
        ) from None
    try:
        yield
    finally:
        os.close(handle)
