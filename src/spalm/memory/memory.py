"""The memory: immutable shards of entries and a catalogue of the documents they come from.

    MEMORY/memory.json         what its keys are: the encoder, how it read, their width
    MEMORY/projection          float32, if keys are reduced: the mean, then the directions
    MEMORY/catalogue.sqlite    documents, shards, versions (see catalogue.py)
    MEMORY/shards/N.keys       float16, a row for each entry, where the entries have keys (see shards.py)
    MEMORY/shards/N.tokens     int32: the token that came next
    MEMORY/exact/              sorted contexts, by which exact matches are found (see exact/index.py)

Entries are numbered in the order in which they are remembered. The number, an entry's id, never changes and is never
used again.
"""

import difflib
import hashlib
import json
import sqlite3
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from pydantic import BaseModel
from torch import Tensor

from spalm.artifact import only_writer
from spalm.digests import digest_of_json
from spalm.errors import DamagedError, InputError
from spalm.files import (
    as_json,
    child,
    entries_below,
    read_json,
    read_text,
    remove_leftovers,
    validated,
    write_atomically,
    write_json,
)
from spalm.manifest import Digest, Size
from spalm.memory.catalogue import Catalogue, record_version
from spalm.memory.compaction import rewrite_shards
from spalm.memory.entries import Entries, LiveDocuments, overlapping_runs
from spalm.memory.exact import ExactIndex
from spalm.memory.projection import Projection, to_half_precision
from spalm.memory.shards import NO_KEYS, Shards
from spalm.memory.sqlite import damaged
from spalm.memory.verification import verify_file, verify_shards
from spalm.settings import differences

IDENTITY = "memory.json"
"""File that makes a directory a memory."""
_PROJECTION = "projection"
"""File of the projection from hidden states to keys."""
_FORMAT = 1
"""Version of the files' format."""
PARTIAL_FILES = {"shards", "exact", _PROJECTION, *Catalogue.FILES}
"""Files that a kill can leave of a memory that was being made, besides temporary ones."""


class _EncoderForm(BaseModel):
    """What `memory.json` says of the encoder."""

    digest: str
    width: Size
    vocabulary: Size


class _IdentityForm(BaseModel):
    """What `memory.json` says of the keys."""

    encoder: _EncoderForm
    reading: dict[str, Any]
    width: Size


class _Description(BaseModel):
    """The form of `memory.json`."""

    format: int
    identity: _IdentityForm
    files: dict[Literal["projection"], Digest]
    sha256: Digest


@dataclass(frozen=True)
class MemoryVersion:
    """A change of a memory."""

    version: int
    """Number of the change, counted from 0."""
    at: str
    """Date and time of the change, in UTC."""
    what: str
    """Description of the change."""


class Memory:
    """A memory on disk. It may be read while another process changes it: `entries` is a view of one version."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        path = self.directory / IDENTITY
        if not path.exists():
            raise InputError(f"{self.directory} holds no memory (no {IDENTITY}); make one with `spalm remember`")
        remedy = f"restore {self.directory} from a copy, or remove it and remember again"
        content = read_json(child(self.directory, IDENTITY), remedy=remedy)
        form: _Description = validated(content, _Description, path, remedy=remedy)
        self.identity: dict[str, Any] = content["identity"]
        self._files: dict[str, str] = content["files"]
        if content["sha256"] != digest_of_json([content["format"], self.identity, self._files]):
            raise DamagedError(f"{path} is damaged (its digest differs); {remedy}")
        if form.format != _FORMAT:
            raise InputError(f"{self.directory} has format {form.format}, this spalm reads {_FORMAT}; upgrade spalm")
        self.full_width, self.width = form.identity.encoder.width, form.identity.width
        self.vocabulary = form.identity.encoder.vocabulary
        self.catalogue = Catalogue(self.directory)
        self.exact = ExactIndex(self)
        self.shards = Shards(child(self.directory, "shards"), self.width, self.vocabulary)
        self._view: tuple[tuple[int, int, bytes], int, Entries] | None = None

    def __reduce__(self) -> tuple:
        """Pickles only the path: another process opens the files itself."""
        return Memory, (self.directory,)

    @classmethod
    def create(cls, directory: Path, identity: dict[str, Any], projection: Projection | None = None) -> "Memory":
        """Makes an empty memory for keys of `identity`. `memory.json` comes last: a folder without it is no memory."""
        (directory / "shards").mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        for leftover in PARTIAL_FILES - {"shards", "exact"}:
            (directory / leftover).unlink(missing_ok=True)
        files = {}
        if projection is not None:
            content = projection.mean.astype("<f4").tobytes() + projection.directions.astype("<f4").tobytes()
            write_atomically(directory / _PROJECTION, content)
            files[_PROJECTION] = hashlib.sha256(content).hexdigest()
        Catalogue.create(directory)
        digest = digest_of_json([_FORMAT, identity, files])
        write_json(directory / IDENTITY, {"format": _FORMAT, "identity": identity, "files": files, "sha256": digest})
        return cls(directory)

    @cached_property
    def projection(self) -> Projection | None:
        """Projection of hidden states to keys; None if keys are not reduced."""
        if _PROJECTION not in self._files:
            return None
        path = child(self.directory, _PROJECTION)
        verify_file(path, self._files[_PROJECTION])
        numbers = np.fromfile(path, "<f4")
        if len(numbers) != self.full_width * (1 + self.width):
            raise DamagedError(f"{path} has {len(numbers):,} numbers; remove {self.directory} and remember again")
        return Projection(numbers[: self.full_width], numbers[self.full_width :].reshape(self.full_width, self.width))

    def keys_of(self, hidden: Float[Tensor, "n full"]) -> Float[np.ndarray, "n width"]:
        """Returns hidden states of the encoder in the form in which keys are stored and searched for."""
        return to_half_precision(hidden if self.projection is None else self.projection(hidden))

    def require_same_keys(self, identity: dict[str, Any]) -> None:
        """Raises an error unless keys made as `identity` says can be compared with the keys of this memory."""
        changed = differences(self.identity, identity)
        if changed:
            raise InputError(
                f"{self.directory} holds keys of another kind ({changed[0]}); give the encoder and settings it was "
                "made with, another directory, or --restart to set this memory aside"
            )

    def entries(self) -> Entries:
        """Returns the live entries as of now. Cheap while nothing has changed."""
        view = self._view  # read once: other threads may replace it
        stamp = self.catalogue.stamp()
        if view is not None and view[0] == stamp:
            return view[2]
        with self.catalogue.read() as connection:
            changes = connection.execute("SELECT max(version) FROM versions").fetchone()[0]
            entries = view[2] if view is not None and view[1] == changes else self.load_entries(connection)
        self._view = stamp, changes, entries
        return entries

    def load_entries(self, connection: sqlite3.Connection, which: str = "forgotten IS NULL") -> Entries:
        """Reads documents, by default the live ones, and where their entries are, from the catalogue."""
        query = f"SELECT id, first_id, entries, name FROM documents WHERE {which} ORDER BY first_id"
        documents = connection.execute(query).fetchall()
        numbers, first_ids, counts = np.array([row[:3] for row in documents], np.int64).reshape(-1, 3).T
        if (first_ids[1:] < (first_ids + counts)[:-1]).any():  # documents that share entries
            raise damaged(self.catalogue.path)
        extents = connection.execute("SELECT first_id, entries, shard, row FROM extents ORDER BY first_id").fetchall()
        runs = overlapping_runs(first_ids, counts, np.array(extents, np.int64).reshape(-1, 4))
        keyless = [row[0] for row in connection.execute("SELECT id FROM shards WHERE keys_sha256 = ?", [NO_KEYS])]
        live = LiveDocuments(numbers, first_ids, counts, [row[3] for row in documents])
        return Entries(live, runs, self.shards, without_keys=keyless)

    @property
    def digest(self) -> str:
        """Digest of what searches can find: memories with the same digest give the same results."""
        with self.catalogue.read() as connection:
            batches = connection.execute("SELECT source, first_id FROM batches WHERE finished ORDER BY id").fetchall()
            alive = connection.execute(
                "SELECT first_id, entries FROM documents WHERE forgotten IS NULL ORDER BY first_id"
            ).fetchall()
        return digest_of_json([self.identity, batches, alive])

    def versions(self) -> list[MemoryVersion]:
        """Returns all changes of the memory, the oldest first."""
        with self.catalogue.read() as connection:
            return [
                MemoryVersion(*row) for row in connection.execute("SELECT version, at, what FROM versions ORDER BY 1")
            ]

    def remembers(self, source: dict[str, Any]) -> bool:
        """Returns whether a document of `source` is alive."""
        return self.first_id(source) is not None

    def written_keys(self) -> int:
        """Returns the number of entries whose keys are on disk, those of unfinished work included."""
        with self.catalogue.read() as connection:
            query = "SELECT coalesce(sum(entries), 0) FROM shards WHERE keys_sha256 <> ?"
            return connection.execute(query, [NO_KEYS]).fetchone()[0]

    def next_id(self) -> int:
        """Returns the id that the next entry will get."""
        with self.catalogue.read() as connection:
            return connection.execute("SELECT coalesce(max(first_id + entries), 0) FROM batches").fetchone()[0]

    def first_id(self, source: dict[str, Any]) -> int | None:
        """Returns the id of position 0 of what was remembered from `source`; None if nothing of it is alive."""
        found = self._ids_of(source)
        return None if found is None else found.start

    def end_id(self, source: dict[str, Any]) -> int:
        """Returns the id after the last position of what was remembered from `source`, which must be alive."""
        found = self._ids_of(source)
        assert found is not None
        return found.stop

    def _ids_of(self, source: dict[str, Any]) -> range | None:
        """Returns the ids of what was remembered from `source`; None if nothing of it is alive."""
        with self.catalogue.read() as connection:
            row = connection.execute(
                "SELECT first_id, entries FROM batches WHERE source = ? AND finished AND EXISTS "
                "(SELECT 1 FROM documents WHERE batch = batches.id AND forgotten IS NULL) ORDER BY id DESC",
                [json.dumps(source, sort_keys=True)],
            ).fetchone()
        return None if row is None else range(row[0], row[0] + row[1])

    def lineage_below(self, id: int) -> list[str]:
        """Returns the digests of `lineage` that are of batches with lower ids than this."""
        with self.catalogue.read() as connection:
            count = connection.execute("SELECT count(*) FROM batches WHERE finished AND first_id < ?", [id]).fetchone()
        return self.lineage()[: 1 + count[0]]

    def lineage(self) -> list[str]:
        """Returns one digest for the kind of keys, and one for each batch.

        The list only grows: an index or a table that was made from a memory fits it as long as the memory's lineage
        begins with the one that it had then.
        """
        with self.catalogue.read() as connection:
            batches = connection.execute("SELECT source, first_id FROM batches WHERE finished ORDER BY id").fetchall()
        return [digest_of_json([self.identity, self._files]), *map(digest_of_json, batches)]

    def forget(self, names: list[str]) -> int:
        """Marks documents as forgotten: no search finds them from now on. Returns the number of documents."""
        with only_writer(self.directory), self.catalogue.change() as connection:
            count = 0
            for name in names:
                known = "SELECT count(*) FROM documents WHERE name = ? AND forgotten IS NULL"
                found = connection.execute(known, [name]).fetchone()[0]
                if not found:
                    raise InputError(self._unknown(name, connection))
                count += found
            version = record_version(connection, f"forgot {count} document(s)")
            connection.executemany(
                "UPDATE documents SET forgotten = ? WHERE name = ? AND forgotten IS NULL",
                [(version, name) for name in names],
            )
        return count

    def _unknown(self, name: str, connection: sqlite3.Connection) -> str:
        """Returns the message about a name that is not remembered."""
        names = [row[0] for row in connection.execute("SELECT name FROM documents WHERE forgotten IS NULL LIMIT 10000")]
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"`spalm show {self.directory} --documents` lists them"
        return f"{self.directory} remembers no document {name!r}; {hint}"

    def compact(self) -> int:
        """Rewrites shards that hold forgotten entries, or are small, and removes the old. Returns the bytes freed."""
        with only_writer(self.directory):
            self.clear_leftovers()
            before = self._bytes()
            rewrite_shards(self.catalogue, self.shards, self.entries())
            self.catalogue.vacuum()
            self.clear_leftovers()
            self.exact.compact()
            return before - self._bytes()

    def clear_leftovers(self) -> None:
        """Removes shard files that the catalogue does not name, which are left by changes that a crash interrupted."""
        self.shards.remove_all_but(set(self.catalogue.shard_numbers()))

    def verify(self) -> int:
        """Reads every byte and compares it with its digest. Returns the number of bytes."""
        self.catalogue.verify()
        path = self.directory / IDENTITY
        if as_json(read_json(path)) != read_text(path):
            raise DamagedError(f"{path} is damaged; restore {self.directory} from a copy")
        for name, digest in self._files.items():
            verify_file(self.directory / name, digest)
        verify_shards(self.catalogue, self.shards)
        self.exact.verify()
        return self._bytes()

    def own_files(self) -> set[Path]:
        """Returns the paths of the files that `verify` checks, and of the mark of a change that is not sealed yet."""
        fixed = [IDENTITY, *self._files, *Catalogue.FILES, *(f"exact/{name}" for name in self.exact.own_files())]
        present = {self.directory / name for name in fixed}
        for shard in self.catalogue.shard_numbers():
            present |= {self.shards.path(column, shard) for column in ("keys", "tokens")}
        return {path for path in present if path.is_file()}

    def _bytes(self) -> int:
        """Returns the size of all files of the memory."""
        return sum(entry.stat().st_size for entry in entries_below(self.directory) if entry.is_file())


def is_memory(directory: Path) -> bool:
    """Returns whether a directory holds a memory."""
    return (directory / IDENTITY).exists()


def describe_memory(memory: Memory) -> dict[str, Any]:
    """Returns what a memory is and holds, as JSON."""
    entries = memory.entries()
    versions = memory.versions()
    return {
        **memory.identity,
        "entries": len(entries),
        "documents": len(entries.live_documents),
        "version": versions[-1].version,
        "digest": memory.digest,
    }
