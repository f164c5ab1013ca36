"""The index of exact matches: sorted contexts of a memory's documents, in shards that are never changed.

    MEMORY/exact/shards.json     names of the shards in use, and their digests
    MEMORY/exact/N/              an artifact: the arrays of SortedContexts (see suffixes.py)

What counts is the catalogue of the memory. A document that is in no shard yet is sorted when it is first searched for;
one that was forgotten is left out of every search at once, and of the files when the memory is compacted.
"""

import os
import shutil
from dataclasses import dataclass, fields
from functools import lru_cache
from mmap import MADV_RANDOM
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from jaxtyping import Bool, Int
from pydantic import BaseModel, ConfigDict, Field

from spalm.artifact import MANIFEST, Artifact, Draft, Stage, only_writer
from spalm.compute import Execution, JobPart, ProgressCallback, SentByFields, in_order
from spalm.console import bar
from spalm.digests import SUMS, digest_of_json
from spalm.errors import DamagedError, InputError
from spalm.files import child, read_json, write_json
from spalm.manifest import Count, Digest
from spalm.memory.entries import Entries
from spalm.memory.exact.matches import SearchedContexts
from spalm.memory.exact.suffixes import SortedContexts, sort_contexts
from spalm.memory.exact.view import ExactView

if TYPE_CHECKING:
    from spalm.memory.memory import Memory

KIND = "sorted contexts"
"""Kind of artifact."""
VERSION = 1
"""Version of the files' format."""
_ARRAYS = [field.name for field in fields(SortedContexts)]
"""Arrays of a shard, each in a file of its name."""
SHARD_TOKENS = 1 << 27
"""Number of tokens of a full shard. Sorting takes some 20 bytes of RAM for each. Every shard is searched by itself."""
_SMALL = 1 << 24
"""Number of tokens below which a shard is small, if that is less than half of a full one."""
_MOST_SMALL = 8
"""Number of small shards from which on they are sorted again together."""
_LIST = "shards.json"
"""File that names the shards in use."""


class _ShardList(BaseModel):
    """The form of the file that names the shards in use."""

    model_config = ConfigDict(extra="forbid")
    shards: dict[Annotated[str, Field(pattern=r"^[0-9]{8,18}$")], Digest]
    sha256: Digest


@dataclass(frozen=True)
class _Documents:
    """Documents to sort: the id of each one's first entry and its number of entries, in the order of the ids."""

    first_ids: Int[np.ndarray, "documents"]
    entries: Int[np.ndarray, "documents"]

    def __getitem__(self, which: Any) -> "_Documents":
        return _Documents(self.first_ids[which], self.entries[which])

    def parts(self, size: int) -> list[JobPart]:
        """Returns groups of documents of about `size` entries each; a longer document is a group of its own."""
        ends = np.cumsum(self.entries)
        parts, first = [], 0
        while first < len(ends):
            before = ends[first] - self.entries[first]
            last = max(first + 1, int(np.searchsorted(ends, before + size, side="right")))
            parts.append(JobPart(len(parts), first, last))
            first = last
        return parts

    def tokens(self, entries: Entries) -> Int[np.ndarray, "tokens"]:
        """Returns the tokens of all documents in a row."""
        rows = entries.rows(self.first_ids)
        breaks = np.flatnonzero(rows[1:] != rows[:-1] + self.entries[:-1]) + 1
        runs = zip(np.split(rows, breaks), np.split(self.entries, breaks))
        return np.concatenate([entries.tokens(int(at[0]), int(at[0] + counts.sum())) for at, counts in runs])

    def sorted(self, entries: Entries, vocabulary: int) -> SortedContexts:
        """Returns the sorted contexts of the documents."""
        return sort_contexts(self.tokens(entries), self.entries, self.first_ids, vocabulary=vocabulary)


@dataclass(frozen=True)
class _SortJob(SentByFields):
    """The job of sorting documents and writing a shard for each part."""

    memory: "Memory"
    documents: _Documents
    folder: Path
    first_shard: int
    """Number of the first part's shard."""

    def name(self, part: JobPart) -> str:
        """Returns the name of a part's shard."""
        return f"{self.first_shard + part.number:08d}"

    def __call__(self, part: JobPart, progress: ProgressCallback) -> str:
        """Writes the shard of a part and returns its digest."""
        own = self.documents[part.first : part.last]

        def fill(draft: Draft) -> tuple[dict[str, Any], list[str]]:
            made = own.sorted(self.memory.entries(), self.memory.vocabulary)
            for name in _ARRAYS:
                draft.write_array(name, getattr(made, name))
            return {"tokens": int(own.entries.sum())}, []

        documents = digest_of_json([own.first_ids.tolist(), own.entries.tolist()])
        stage = Stage(KIND, VERSION, {"documents": documents}, {"keys": self.memory.lineage()[0]}, cheap=True)
        made = stage.make(self.folder / self.name(part), fill)
        progress(len(part))
        return made.digest


class _Facts(BaseModel):
    """The form of a shard's facts."""

    tokens: Count


@dataclass(frozen=True)
class _Shard:
    """A shard on disk: its files are mapped only when they are searched."""

    artifact: Artifact
    first_ids: Int[np.ndarray, "documents"]
    """Id of each document's first entry."""

    @property
    def small(self) -> bool:
        """Whether the shard should be sorted again with others of its kind."""
        return self.artifact.facts["tokens"] < min(_SMALL, SHARD_TOKENS / 2)

    def contexts(self) -> SortedContexts:
        """Returns the sorted contexts, memory-mapped."""
        arrays = [self.artifact.array(name) for name in _ARRAYS]
        if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays):
            raise DamagedError(f"{self.artifact.directory} is damaged: it holds arrays of another kind")
        for array in arrays:
            if isinstance(array, np.memmap):  # a search reads few pages, far apart: reading ahead would only fill RAM
                array._mmap.madvise(MADV_RANDOM)  # pyright: ignore[reportAttributeAccessIssue]
        return SortedContexts(*arrays)


class ExactIndex:
    """The index of a memory: `current` gives the documents that the memory holds at that moment, to be searched."""

    def __init__(self, memory: "Memory"):
        self._memory, self.folder = memory, memory.directory / "exact"
        self._list = str(self.folder / _LIST)
        self._open = lru_cache(maxsize=256)(self._open_shard)
        self._searched: tuple[Entries, dict[str, str], ExactView] | None = None
        self._read_list: tuple[tuple[int, ...], dict[str, str]] | None = None

    def current(self) -> ExactView:
        """Returns what the memory holds now, for many searches: asking for it takes longer than a search."""
        while True:
            entries, listed = self._memory.entries(), self._listed()
            searched = self._searched  # read once: other threads may replace it
            if searched is not None and searched[0] is entries and searched[1] == listed:
                return searched[2]
            try:
                self._searched = entries, listed, ExactView(self._search_live(entries, listed))
            except (InputError, OSError):
                # Another process may have removed a shard since it was listed.
                if self._memory.entries() is entries and self._listed() == listed:
                    raise

    def catch_up(self, execution: Execution | None = None) -> None:
        """Sorts documents that are in no shard yet and writes them. Many small shards are sorted again together."""
        with self._writing():
            small = {name for name, shard in self._in_use().items() if shard.small}
            self._write(small if len(small) >= _MOST_SMALL else set(), execution or Execution())

    def compact(self) -> None:
        """Removes the text of forgotten documents from the files: shards that hold any are sorted again without it."""
        if self.folder.exists():
            live = self._memory.entries().live_documents.first_ids
            with self._writing():
                shards = self._in_use().items()
                self._write({name for name, shard in shards if not np.isin(shard.first_ids, live).all()}, Execution())

    def verify(self) -> None:
        """Reads every byte of the shards in use and compares it with its digest."""
        for shard in self._in_use().values():
            shard.artifact.verify()

    def own_files(self) -> list[str]:
        """Returns the names of the files that `verify` checks, with the folders of the shards."""
        shards = self._in_use()
        inner = [f"{name}/{file}" for name in shards for file in (MANIFEST, SUMS, *_ARRAYS)]
        return [_LIST, *inner] if shards else []

    def _writing(self) -> Any:
        """Returns a context in which no other process writes the index."""
        self.folder.mkdir(exist_ok=True)
        return only_writer(self.folder)

    def _write(self, replaced: set[str], execution: Execution) -> None:
        """Writes shards of all documents that are in none but the `replaced` ones, which are removed."""
        listed = self._listed()
        kept = {name: digest for name, digest in listed.items() if name not in replaced}
        documents = self._unsorted(self._memory.entries(), [self._open(*shard) for shard in kept.items()])
        if len(documents.first_ids) or replaced:
            job = _SortJob(self._memory, documents, self.folder, 1 + max(map(int, listed), default=0))
            parts, engine = documents.parts(SHARD_TOKENS), execution.engine
            with bar("sort contexts", len(documents.first_ids)) as shown:
                made = in_order(engine.run_parts(job, parts, shown.advance, threads=1))
                kept |= {job.name(part): digest for part, digest in made}
            write_json(self.folder / _LIST, {"shards": kept, "sha256": digest_of_json(kept)})
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in kept:
                shutil.rmtree(path)

    def _listed(self) -> dict[str, str]:
        """Returns the names of the shards in use, and their digests."""
        try:
            state = os.stat(self._list)  # noqa: PTH116 - for each token that is generated, so without a path to parse
        except FileNotFoundError:
            return {}
        stamp = state.st_ino, state.st_size, state.st_ctime_ns  # another one each time, as the file is replaced
        known = self._read_list
        if known is not None and known[0] == stamp:
            return known[1]
        listed = self._read()
        self._read_list = stamp, listed
        return listed

    def _read(self) -> dict[str, str]:
        """Returns what the list of shards says; raises an error if it is damaged."""
        content: _ShardList = read_json(child(self.folder, _LIST), _ShardList, remedy=self._remedy)
        if content.sha256 != digest_of_json(content.shards):
            raise self._damaged(self.folder / _LIST)
        return content.shards

    @property
    def _remedy(self) -> str:
        return f"remove {self.folder}, and it is made again from the memory"

    def _damaged(self, path: Path) -> DamagedError:
        """Returns the error that reports damage of the index."""
        return DamagedError(f"{path} is damaged; {self._remedy}")

    def _open_shard(self, name: str, digest: str) -> _Shard:
        """Opens a shard; refuses one whose manifest was changed."""
        shard = Artifact(child(self.folder, name), KIND, _Facts)
        if shard.digest != digest:
            raise self._damaged(self.folder / name)
        return _Shard(shard, np.array(shard.array("first_ids")))

    def _in_use(self) -> dict[str, _Shard]:
        """Returns the shards in use by name."""
        return {name: self._open(name, digest) for name, digest in self._listed().items()}

    def _searchable(self, shard: _Shard, alive: Bool[np.ndarray, "documents"]) -> SortedContexts:
        """Returns the contexts of the documents of a shard that are alive."""
        contexts = shard.contexts()
        try:
            contexts.refuse_unless_plausible(self._memory.vocabulary)
            return contexts if alive.all() else contexts.only(alive)
        except (DamagedError, IndexError, ValueError):
            raise self._damaged(shard.artifact.directory) from None

    @staticmethod
    def _unsorted(entries: Entries, shards: list[_Shard]) -> _Documents:
        """Returns the live documents that are in none of these shards."""
        live = entries.live_documents
        known = [shard.first_ids for shard in shards]
        new = ~np.isin(live.first_ids, np.concatenate(known)) if known else np.ones(len(live), bool)
        new &= live.entries > 0
        return _Documents(live.first_ids[new], live.entries[new])

    def _search_live(self, entries: Entries, listed: dict[str, str]) -> list[SearchedContexts]:
        """Returns the sorted contexts of the live documents, ready to be searched."""
        found, live, shards = [], entries.live_documents.first_ids, [self._open(*shard) for shard in listed.items()]
        for shard in shards:
            alive = np.isin(shard.first_ids, live)
            if alive.any():
                found.append(self._searchable(shard, alive))
        unsorted = self._unsorted(entries, shards)
        if len(unsorted.first_ids):
            found.append(unsorted.sorted(entries, self._memory.vocabulary))
        return [SearchedContexts(contexts) for contexts in found]
