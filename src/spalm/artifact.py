"""Artifacts: what stages make and read, each a directory that describes itself.

    DIR/manifest.json     what it is, its settings, its parents' digests, its files with size, dtype, shape and digest
    DIR/SHA256SUMS        digests of all files, the manifest included
    DIR/...               the files

The manifest is written last and in one step, so a directory with a manifest is complete. A directory that is still
being made holds `unfinished.json` instead, which says what it will be: work resumes only where it is the same work.
"""

import fcntl
import itertools
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
from spalm.digests import SUMS, digest_of_file, digest_of_json, digest_of_text, read_sums, refuse_changed, write_sums
from spalm.errors import DamagedError, InputError, InUseError
from spalm.files import (
    as_json,
    child,
    is_leftover,
    is_plain_name,
    read_json,
    refuse_hole,
    refuse_links_out_of,
    remove_leftovers,
    validated,
    write_atomically,
    write_json,
)
from spalm.manifest import Described, Identity, Manifest
from spalm.settings import differences

MANIFEST = "manifest.json"
"""File that describes a finished artifact."""
UNFINISHED = "unfinished.json"
"""File that describes an artifact that is being made."""
ERASING = "erasing.json"
"""File that marks an artifact of which parts are being erased: its manifest is not that of its files."""
_ERASED = "digest_before_erasure"
"""Field of a manifest that holds the digest of the artifact before parts of it were erased."""
SCRATCH = "scratch.json"
"""File that lists the scratch files and folders, which are removed once the artifact is complete."""
PREVIOUS = ".previous"
"""End of the name of an artifact that was set aside, before a number if there are several."""


class Artifact:
    """A finished artifact, opened for reading. Opening checks the manifest, and that every file has its full size."""

    def __init__(self, directory: Path | str, kind: str | None = None, facts: Any = None):
        """`facts` is the type that the facts must have, for pydantic."""
        self.directory = Path(directory)
        path, again = self.directory / MANIFEST, f"remove {self.directory} and make it again"
        if not path.exists():
            state = "is unfinished: run the same command again" if self.directory.exists() else "does not exist"
            raise InputError(f"{self.directory} {state} (no {MANIFEST})")
        if (self.directory / ERASING).exists():
            raise InputError(f"removing documents from {self.directory} was interrupted; run `spalm compact` again")
        refuse_changed(self.directory, [MANIFEST], again)
        self.manifest: dict[str, Any] = read_json(child(self.directory, MANIFEST), remedy=again)
        form: Manifest = validated(self.manifest, Manifest, path, remedy=again)
        self.kind = form.kind
        self.settings, self.facts = Described(form.settings, path), Described(form.facts, path)
        if kind is not None and self.kind != kind:
            raise InputError(f"{self.directory} holds a {self.kind}, a {kind} is needed; give another directory")
        if facts is not None:
            validated(self.facts, facts, path, remedy=again)
        for name, entry in form.files.items():
            file = child(self.directory, name)
            size = file.stat().st_size if file.is_file() else None
            if size != entry.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes, its manifest says {entry.bytes:,}"
                raise DamagedError(f"{file} {found}; {again}")
            refuse_hole(file)

    @property
    def identity(self) -> dict[str, Any]:
        """Description of what the artifact is: kind, version, settings and parents."""
        return {key: self.manifest[key] for key in ("kind", "version", "settings", "parents")}

    @property
    def digest(self) -> str:
        """Digest of everything in the artifact: the manifest holds the digest of each file.

        It stays the same if parts are erased later, because what was made from them names them by it.
        """
        return self.manifest.get(_ERASED) or digest_of_json(self.manifest)

    def array(self, name: str) -> np.ndarray:
        """Returns the array called `name`, memory-mapped and read-only."""
        entry = self.manifest["files"].get(name, {})
        if "shape" not in entry:
            raise DamagedError(f"{self.directory} has no array {name}; remove it and make it again")
        shape = tuple(entry["shape"])
        if not all(shape):
            return np.zeros(shape, entry["dtype"])
        return np.memmap(self.directory / name, dtype=entry["dtype"], mode="r", shape=shape)

    def verify(self) -> None:
        """Reads every byte and compares it with the digests of the manifest."""
        for name in self.manifest["files"]:
            self.intact(name)

    def intact(self, name: str) -> Path:
        """Returns the path of a file; refuses one whose bytes are not those of the manifest."""
        path, entry = child(self.directory, name), self.manifest["files"].get(name)
        if entry is None or not path.is_file() or digest_of_file(path) != entry["sha256"]:
            raise DamagedError(f"{path} is damaged (its digest differs); make it again")
        return path


@contextmanager
def erasing(directory: Path) -> Iterator[None]:
    """Marks a finished artifact while parts of its files are erased, then writes its manifest anew."""
    write_json(directory / ERASING, {})
    yield
    finish_erasure(directory)


def finish_erasure(directory: Path) -> None:
    """Writes the manifest of an artifact anew from its files, of which parts were erased; its digest stays."""
    manifest = read_json(child(directory, MANIFEST), dict)
    form: Manifest = validated(manifest, Manifest, directory / MANIFEST, remedy=f"remove {directory}")
    entries = {}
    for name in form.files:
        path = child(directory, name)
        entries[name] = {**manifest["files"][name], "bytes": path.stat().st_size, "sha256": digest_of_file(path)}
    digest = form.digest_before_erasure or digest_of_json(manifest)
    content = as_json({**manifest, "files": entries, _ERASED: digest})
    sums = {**(read_sums(directory) or {}), **{name: entry["sha256"] for name, entry in entries.items()}}
    write_sums(directory, {**sums, MANIFEST: digest_of_text(content)})
    write_atomically(directory / MANIFEST, content)
    (directory / ERASING).unlink()


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
        assert is_plain_name(name)
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
        manifest = as_json({**identity, "facts": dict(facts), "files": entries, "spalm": spalm.__version__})
        sums = {name: entry["sha256"] for name, entry in entries.items()}
        sums |= {name: digest_of_file(self.directory / name) for name in self._others({*entries})}
        write_sums(self.directory, {**sums, MANIFEST: digest_of_text(manifest)})
        write_atomically(self.directory / MANIFEST, manifest)
        (self.directory / UNFINISHED).unlink()
        tidy(self.directory)

    def _others(self, listed: set[str]) -> list[str]:
        """Returns the names of the files that stay but are not in the manifest, such as a log."""
        passing = {UNFINISHED, SCRATCH, SUMS, MANIFEST, *_scratch_of(self.directory)}
        names = [path.name for path in self.directory.iterdir() if path.is_file()]
        return [name for name in names if name not in passing | listed and not is_leftover(name)]


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
                    tidy(directory)  # scratch files of a run that was killed at the very end
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
            begun = read_json(child(directory, UNFINISHED), Identity, remedy=f"remove {directory} and begin again")
            changed = differences(begun.model_dump(), self.identity)
            if not changed:
                return
            if not self.cheap:
                raise InputError(
                    f"{directory} holds unfinished work with other settings ({changed[0]}); "
                    "go back to them, choose another --out, or give --restart to begin again"
                )
        remove_leftovers(directory)
        others = [path for path in directory.iterdir() if path.name not in (UNFINISHED, SCRATCH)]
        if others and not marker.exists():
            raise InputError(f"{directory} holds files that are not ours ({others[0].name}); choose another --out")
        for path in others:
            _remove(path)
        write_json(marker, self.identity)


def _scratch_of(directory: Path) -> list[str]:
    """Returns the names of the scratch files and folders that a directory lists, all of them in the directory."""
    path = directory / SCRATCH
    if not path.exists():
        return []
    names = read_json(child(directory, SCRATCH), list[str], remedy=f"remove {directory} and make it again")
    if not all(map(is_plain_name, names)):
        raise DamagedError(f"{path} names files that are not in {directory}; remove {directory} and make it again")
    return names


def tidy(directory: Path) -> None:
    """Removes the scratch files and folders of a directory, then the list that names them."""
    for name in _scratch_of(directory):
        _remove(directory / name)
    (directory / SCRATCH).unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Removes a file, if it is there, or a folder with all that is in it."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


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
    """Locks the directory for this process. A second writer is refused at once; a crash releases the lock.

    Nothing is written where a symbolic link leads elsewhere: somebody else may have put it there.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InUseError(
            f"{directory} is being written by another process; wait for it or choose another --out"
        ) from None
    try:
        refuse_links_out_of(directory)
        yield
    finally:
        os.close(handle)
