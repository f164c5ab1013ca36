"""Builds an index and tunes its search effort to a recall, saves it, and opens it again."""

import errno
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field
from safetensors import SafetensorError

from spalm.artifact import only_writer
from spalm.compute import LOCAL, Engine
from spalm.console import bar, say
from spalm.digests import SUMS, digest_of_file, digest_of_json, digest_of_text, read_sums, refuse_changed, write_sums
from spalm.errors import DamagedError, InputError
from spalm.files import as_json, child, read_json, sync_to_disk, write_atomically
from spalm.manifest import Count, Size
from spalm.memory import Entries, Memory
from spalm.neighbours.exact import exact_search
from spalm.neighbours.exclusion import ONLY_ITSELF
from spalm.neighbours.index.contract import Index
from spalm.neighbours.index.ivf import FaissIndex
from spalm.neighbours.index.kinds import FILES, LISTS, IndexKind, build_index, load_index
from spalm.neighbours.index.searcher import Searcher, query_exclusion
from spalm.neighbours.parallel import ParallelMap, thread_map
from spalm.neighbours.recall import recall_at_k
from spalm.settings import Seed, Settings

DESCRIPTION = "index.json"
"""File that describes an index."""
WORK = re.compile(r"work-[0-9a-f]{16}")
"""Name of a folder for unfinished work."""
_AGAIN = "make the index again with `spalm index`"
"""Remedy of a damaged index."""
_LARGE = 1 << 30
"""Size of lists on disk from which on not every byte is read when the index is opened."""
_SAMPLE = 256
"""Number of entries on which recall is measured."""
_SLACK = 1e-6
"""Difference up to which two squared distances count as the same."""


class IndexSettings(Settings):
    """Kind of the index to build, and the recall that it must reach."""

    kind: IndexKind = "faiss"
    """Kind of index."""
    recall: float = Field(default=0.95, gt=0, le=1)
    """Share of the true neighbours to be found."""
    neighbours: int = Field(default=4, gt=0, le=1 << 16)
    """Number of neighbours by which the recall is measured."""
    seed: Seed = 1
    """Seed of the random samples."""


@dataclass(frozen=True)
class IndexDescription:
    """Description of an index on disk, stored beside it."""

    kind: IndexKind
    """Kind of index."""
    lineage: list[str]
    """Lineage of the memory when the index was made: an index of other keys is refused."""
    next_id: int
    """First id that the index does not hold. It holds the entries with lower ids that were alive when it was made."""
    effort: int
    """Effort with which the index is to be searched."""
    recall: float | None
    """Recall against exact search, on a sample of entries; None if there was nothing to find."""

    def as_json(self) -> dict[str, Any]:
        """Returns the content of the description's file."""
        return {
            "kind": self.kind,
            "lineage": self.lineage,
            "upto": self.next_id,
            "effort": self.effort,
            "recall": self.recall,
        }

    @classmethod
    def read(cls, folder: Path) -> "IndexDescription":
        """Reads the description's file."""
        stored: _Stored = read_json(child(folder, DESCRIPTION), _Stored, remedy=_AGAIN)
        return cls(stored.kind, stored.lineage, stored.upto, stored.effort, stored.recall)


class _Stored(BaseModel):
    """The form of the description's file."""

    kind: IndexKind
    lineage: list[str]
    upto: Count
    effort: Size
    recall: float | None


class _RecallSample:
    """A sample of entries and the distances of their true neighbours, by which the recall of searches is measured."""

    def __init__(self, entries: Entries, count: int, seed: int, *, parallel: ParallelMap):
        rows = np.sort(np.random.default_rng(seed).choice(len(entries), min(_SAMPLE, len(entries)), replace=False))
        self._own, self._queries, self._count = entries.ids(rows), entries.take(rows).astype(np.float32), count
        with bar("search a sample exactly", None):
            excluded = query_exclusion(entries, self._own, ONLY_ITSELF)
            _, self._true = exact_search(self._queries, entries, count, parallel=parallel, exclusion=excluded)

    def recall(self, searcher: Searcher) -> float | None:
        """Returns the share of the true neighbours that a search finds; None if there are none."""
        if not np.isfinite(self._true).any():
            return None
        _, found = searcher.search(self._queries, self._count, own=self._own)
        return recall_at_k(found, self._true, _SLACK)


def make_searcher(
    memory: Memory, directory: Path, settings: IndexSettings, *, engine: Engine = LOCAL
) -> tuple[Searcher, IndexDescription]:
    """Builds an index of the memory, raises its effort until the recall is reached, and saves it."""
    kind, seed = settings.kind, settings.seed
    entries = memory.entries().with_keys
    if not len(entries):
        raise InputError(f"{memory.directory} holds no keys; add documents with `spalm remember`")
    if directory.is_symlink():
        raise InputError(f"{directory} is a symbolic link; give the folder itself, or remove the link")
    directory.mkdir(parents=True, exist_ok=True)
    with only_writer(directory), thread_map(engine.requested_threads) as parallel:
        work = _work(directory, memory, seed)
        for folder in (work, memory.directory):
            engine.refuse_unless_shared(folder)
        try:
            index = build_index(kind, entries, seed, folder=work, engine=engine)
        except RuntimeError as error:
            raise OSError(errno.EIO, f"the index could not be made ({_last_line(error)})", str(directory)) from None
        next_id = 0 if kind == "exact" else int(entries.ids(np.array([len(entries) - 1]))[0]) + 1
        searcher = Searcher(memory, index, next_id, parallel=parallel)
        index.effort = 1
        sample = _RecallSample(entries, settings.neighbours, seed, parallel=parallel)
        while (found := sample.recall(searcher)) is not None and found < settings.recall:
            if index.effort >= index.most_effort:
                say(f"{kind}: a recall of {settings.recall} is out of reach, {found:.3f} is what can be had")
                break
            index.effort = min(2 * index.effort, index.most_effort)
        description = IndexDescription(kind, memory.lineage(), next_id, index.effort, found)
        _save(index, description, directory)
        shutil.rmtree(work)
    measured = "no recall to measure" if found is None else f"recall@{settings.neighbours} {found:.3f}"
    say(f"{directory}: {kind} index of {len(entries):,} entries, {measured}")
    return Searcher(memory, index, next_id), description


def _work(directory: Path, memory: Memory, seed: int) -> Path:
    """Returns the folder for unfinished work, and removes the folders of other states of the memory."""
    wanted = directory / f"work-{digest_of_json([memory.digest, seed])[:16]}"
    for other in directory.iterdir():
        if WORK.fullmatch(other.name) and other != wanted:
            shutil.rmtree(other)
    wanted.mkdir(exist_ok=True)
    return wanted.absolute()


def _save(index: Index, description: IndexDescription, directory: Path) -> None:
    """Replaces the index in a folder. The description is written last: without it, there is no index."""
    remove_index(directory)
    try:
        index.save(directory)
    except RuntimeError as error:
        raise OSError(errno.EIO, f"the index could not be written ({_last_line(error)})", str(directory)) from None
    names = index_files(directory)
    for name in names:
        sync_to_disk(directory / name)
    content = as_json(description.as_json())
    sums = {name: digest_of_file(directory / name) for name in names}
    write_sums(directory, {**sums, DESCRIPTION: digest_of_text(content)})
    write_atomically(directory / DESCRIPTION, content)


def remove_index(directory: Path) -> None:
    """Removes the files of an index, the description first: without it, there is no index."""
    for name in (DESCRIPTION, SUMS, *FILES):
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _last_line(error: RuntimeError) -> str:
    """Returns the last line of a message of faiss: the lines before it name a place in its source."""
    return str(error).strip().splitlines()[-1]


def index_files(directory: Path) -> list[str]:
    """Returns the names of the files of an index, besides its description."""
    return [name for name in FILES if (directory / name).is_file()]


def _refuse_damaged(directory: Path) -> None:
    """Raises an error unless the files of an index are as they were written: the libraries trust what they read.

    Of the lists of an index on disk, which may be larger than RAM, only the size is checked where they are large: the
    library looks up in another file where each list is.
    """
    for name in index_files(directory):
        child(directory, name)
    sums = read_sums(directory)
    if sums is None:
        return  # made by an earlier version
    missing = sums.keys() - {DESCRIPTION, *index_files(directory)}
    if missing or sums.keys() < {*index_files(directory)}:
        raise DamagedError(f"{directory} is damaged (files are missing, or not its own); {_AGAIN}")
    large = {name for name in (LISTS,) if name in sums and (directory / name).stat().st_size > _LARGE}
    refuse_changed(directory, sums.keys() - large, _AGAIN)


def open_searcher(memory: Memory, directory: Path) -> tuple[Searcher, IndexDescription]:
    """Opens the index at `directory` for a memory with the same kind of keys, however that has changed since."""
    path = directory / DESCRIPTION
    if not path.exists():
        raise InputError(f"{directory} holds no index (no {DESCRIPTION}); make one with `spalm index`")
    refuse_changed(directory, [DESCRIPTION], _AGAIN)
    description = IndexDescription.read(directory)
    if description.lineage != memory.lineage()[: len(description.lineage)]:
        raise InputError(f"{directory} is an index of other keys than {memory.directory}'s; make it again")
    _refuse_damaged(directory)
    try:
        index = load_index(description.kind, directory)
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError):
        raise DamagedError(f"{directory} is damaged; {_AGAIN}") from None
    if isinstance(index, FaissIndex) and index.key_width != memory.width:
        raise DamagedError(f"{directory} is damaged (it is for keys of another width); {_AGAIN}")
    index.effort = description.effort
    return Searcher(memory, index, description.next_id), description
