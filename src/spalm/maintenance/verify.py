"""Verification of everything in a directory: every file is compared with a digest of it, or named as unchecked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from spalm.artifact import MANIFEST, UNFINISHED, Artifact
from spalm.attachment import ATTACHED_FILE
from spalm.attachment.attached import read_description
from spalm.digests import KNOWN, SUMS, KnownDigests, digest_of_own_file, read_sums
from spalm.errors import DamagedError, InputError
from spalm.files import child, entries_below, holds_stage
from spalm.lm.pretrained import PretrainedFolder
from spalm.memory import Memory, is_memory
from spalm.memory.catalogue import Catalogue
from spalm.memory.memory import IDENTITY
from spalm.neighbours.index.build import DESCRIPTION, WORK

_SHOWN = 5
"""Number of files that a message names."""


@dataclass
class Verification:
    """What was found in a directory."""

    directory: Path
    checked: int = 0
    """Number of files whose bytes are those that were written."""
    damaged: list[str] = field(default_factory=list)
    """A line for each file that is not as it was written, or is missing."""
    unchecked: list[Path] = field(default_factory=list)
    """Files of which no digest was kept."""

    def summary(self) -> str:
        """Returns the result in a line; raises an error if anything is damaged."""
        if self.damaged:
            more = f" (and {len(self.damaged) - 1:,} more)" if len(self.damaged) > 1 else ""
            raise DamagedError(f"{self.damaged[0]}{more}")
        if not self.unchecked:
            return f"{self.directory}: every byte is as it was written ({self.checked:,} files)"
        names = ", ".join(_relative(path, self.directory) for path in self.unchecked[:_SHOWN])
        more = f" and {len(self.unchecked) - _SHOWN:,} more" if len(self.unchecked) > _SHOWN else ""
        return (
            f"{self.directory}: {self.checked:,} files are as they were written; {len(self.unchecked):,} could not be "
            f"checked, because no digest of them was kept: {names}{more}"
        )


def _relative(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)


def verify_directory(directory: Path) -> Verification:
    """Reads every byte of a run, a model with a memory, or a part of one, and compares it with what was written."""
    if not directory.is_dir():
        raise InputError(f"there is no folder {directory}; give a run, a model with a memory, or a part of one")
    found = _Verifier(Verification(directory)).verified(directory)
    if not found.checked and not found.damaged:
        raise InputError(f"{directory} holds nothing that spalm made; give a run, a model with a memory, or a stage")
    return found


def _is_unfinished(folder: Path) -> bool:
    """Returns whether a stage or an index is still being made: its description, which is written last, is missing.

    If it was killed just before that, it holds a list of digests already, which names the description too.
    """
    if (folder / UNFINISHED).exists():
        return not (folder / MANIFEST).exists()
    return not (folder / DESCRIPTION).exists() and any(WORK.fullmatch(path.name) for path in folder.iterdir())


class _Verifier:
    """Goes through folders, and adds what it finds to a `Verification`."""

    def __init__(self, found: Verification):
        self._found = found
        self._seen: set[Path] = set()
        """Folders that were verified: links may lead to them again."""

    def verified(self, folder: Path) -> Verification:
        """Verifies a folder and those inside it. Of the links in them, only those to whole stages are followed."""
        waiting = [folder]
        while waiting:
            inner = waiting.pop()
            if inner.resolve() not in self._seen:
                self._seen.add(inner.resolve())
                waiting += reversed(self._folder(inner))
        return self._found

    def _folder(self, folder: Path) -> list[Path]:
        """Verifies the files of a folder; returns the folders in it that are to be verified too."""
        if is_memory(folder):
            self._memory(folder)
            return []
        # Without shards nothing is lost: making the memory was interrupted, and begins anew.
        if any((folder / name).exists() for name in Catalogue.FILES) and any(folder.glob("shards/*")):
            self._found.damaged.append(f"{folder / IDENTITY} is missing; restore {folder} from a copy")
        checked = self._files(folder)
        if (folder / ATTACHED_FILE).exists():
            with self._noted():
                self._base(folder)
        inner = []
        for path in sorted(folder.iterdir()):
            if path.is_dir() and (not path.is_symlink() or holds_stage(path)):
                inner.append(path)
            elif path.name not in checked:
                self._found.unchecked.append(path)
        return inner

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Notes damage that is found inside, instead of ending there."""
        try:
            yield
        except (InputError, OSError) as error:
            self._found.damaged.append(str(error))

    def _memory(self, folder: Path) -> None:
        """Verifies a memory, which knows its own files."""
        with self._noted():
            memory = Memory(folder)
            memory.verify()
            own = memory.own_files()
            for path in sorted(Path(entry.path) for entry in entries_below(folder)):
                if (path.is_file() or path.is_symlink()) and path not in own:
                    self._found.unchecked.append(path)
            self._found.checked += len(own)

    def _files(self, folder: Path) -> set[str]:
        """Verifies the files of a folder by its manifest and its list of digests; returns the names of those."""
        if _is_unfinished(folder):
            return set()
        digests: dict[str, set[str]] = {}
        with self._noted():
            for name, digest in (read_sums(folder) or {}).items():
                digests.setdefault(name, set()).add(digest)
        if (folder / MANIFEST).exists():
            with self._noted():
                for name, entry in Artifact(folder).manifest["files"].items():
                    digests.setdefault(name, set()).add(entry["sha256"])
        checked = {*digests}
        for name, expected in sorted(digests.items()):
            with self._noted():
                path = child(folder, name)
                if not path.is_file() or {digest_of_own_file(path)} != expected:
                    state = "is damaged (its digest differs)" if path.is_file() else "is missing"
                    raise DamagedError(f"{path} {state}; restore it from a copy, or make {folder} again")
                self._found.checked += 1
        if (folder / SUMS).exists():
            checked.add(SUMS)
            self._found.checked += 1
        if (folder / KNOWN).exists():
            checked.add(KNOWN)
            with self._noted():
                KnownDigests(folder / KNOWN).read()
        return checked

    def _base(self, folder: Path) -> None:
        """Verifies the base model of an attached folder, wherever that is."""
        path, digest = read_description(folder)
        if not path.is_dir():
            raise DamagedError(f"{path}, the model of {folder}, is gone; put it back, or attach again")
        if digest not in PretrainedFolder(path).digests(digest_of_own_file):
            raise DamagedError(f"{path}, the model of {folder}, is damaged or another one; put it back")
        self._found.checked += 1
