"""The memory: immutable shards of entries and a catalogue of the documents they come from.

    MEMORY/memory.json         what its keys are: the encoder, how it read, their width
    MEMORY/projection          float32, if keys are reduced: the mean, then the directions
    MEMORY/catalogue.sqlite    documents, shards, versions (see catalogue.py)
    MEMORY/shards/N.keys       float16, a row for each entry
    MEMORY/shards/N.tokens     int32: the token that came next

An entry's id is its place in the order in which entries were ever remembered. It never changes and is never used again.
"""

import difflib
import hashlib
import json
import os
import re
import secrets
import sqlite3
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spalm.artifact import TEMPORARY, digest_of_file, digest_of_json, only_writer, write_atomically, write_json
from spalm.errors import InputError
from spalm.memory.catalogue import Catalogue
from spalm.memory.entries import Documents, Entries, Shards
from spalm.memory.projection import Projection
from spalm.settings import differences

IDENTITY = "memory.json"
PROJECTION = "projection"
FORMAT = 1
HALF_MADE = {"shards", PROJECTION, *(name + TEMPORARY for name in (IDENTITY, PROJECTION, "catalogue.sha256"))}
HALF_MADE |= {"catalogue.sqlite", "catalogue.sqlite-journal", "catalogue.sha256", "catalogue.pending"}
"""What a kill can leave of a memory that was being made."""
SHARD_BYTES = 64 << 20
"""Size of a shard's keys: a kill while remembering loses the making of one, or of those that a cluster is at."""


_SHARD_FILE = re.compile(rf"(\d{{8,}})\.(?:keys|tokens)((?:\.[0-9a-f]+)?{re.escape(TEMPORARY)})?")


@dataclass(frozen=True)
class Version:
    version: int
    at: str
    what: str


class Memory:
    """A memory on disk. Reading is safe while another process changes it: `entries` is a view of one version."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        path = self.directory / IDENTITY
        if not path.exists():
            raise InputError(f"{self.directory} holds no memory (no {IDENTITY}); make one with `spalm remember`")
        try:
            content = json.loads(path.read_text())
            self.identity: dict[str, Any] = content["identity"]
            self._files: dict[str, str] = content["files"]
            self.full_width, self.width = int(self.identity["encoder"]["width"]), int(self.identity["width"])
            honest = content["sha256"] == digest_of_json([content["format"], self.identity, self._files])
        except (ValueError, KeyError, TypeError):
            honest = False
        if not honest:
            raise InputError(
                f"{path} is damaged; restore {self.directory} from a copy, or remove it and remember again"
            )
        if content["format"] != FORMAT:
            raise InputError(
                f"{self.directory} has format {content['format']}, this spalm reads {FORMAT}; upgrade spalm"
            )
        self.catalogue = Catalogue(self.directory)
        self.shards = Shards(self.directory / "shards", self.width)
        self._view: tuple[int, Entries] | None = None

    def __reduce__(self) -> tuple:
        """It goes to another process as a path."""
        return Memory, (self.directory,)

    @classmethod
    def create(cls, directory: Path, identity: dict[str, Any], projection: Projection | None = None) -> "Memory":
        """An empty memory for keys of `identity`; `memory.json` is written last, so that half of one is none."""
        (directory / "shards").mkdir(parents=True, exist_ok=True)
        for leftover in HALF_MADE - {"shards"}:
            (directory / leftover).unlink(missing_ok=True)
        files = {}
        if projection is not None:
            content = projection.mean.astype("<f4").tobytes() + projection.directions.astype("<f4").tobytes()
            write_atomically(directory / PROJECTION, content)
            files[PROJECTION] = hashlib.sha256(content).hexdigest()
        Catalogue.create(directory)
        digest = digest_of_json([FORMAT, identity, files])
        write_json(directory / IDENTITY, {"format": FORMAT, "identity": identity, "files": files, "sha256": digest})
        return cls(directory)

    @cached_property
    def projection(self) -> Projection | None:
        if PROJECTION not in self._files:
            return None
        numbers = np.fromfile(self.directory / PROJECTION, "<f4")
        return Projection(numbers[: self.full_width], numbers[self.full_width :].reshape(self.full_width, self.width))

    def keys_of(self, hidden: Float[Tensor, "n full"]) -> Float[np.ndarray, "n width"]:
        """Hidden states of the encoder as they are stored and searched for."""
        return as_keys(hidden if self.projection is None else self.projection(hidden))

    def refuse_others(self, identity: dict[str, Any]) -> None:
        """Complains unless keys made as `identity` says belong with the keys that are here."""
        changed = differences(self.identity, identity)
        if changed:
            raise InputError(
                f"{self.directory} holds keys of another kind ({changed[0]}); give the encoder and settings it was "
                "made with, another directory, or --restart to set this memory aside"
            )

    # What is there

    def entries(self) -> Entries:
        """The live entries, as of now. Cheap while nothing has changed."""
        with self.catalogue.read() as connection:
            changes = connection.execute("SELECT max(version) FROM versions").fetchone()[0]
            view = self._view  # other threads may exchange it meanwhile
            if view is None or view[0] != changes:
                self._view = view = changes, self._load(connection)
        return view[1]

    def _load(self, connection: sqlite3.Connection) -> Entries:
        documents = connection.execute(
            "SELECT id, first_id, entries, name FROM documents WHERE forgotten IS NULL ORDER BY first_id"
        ).fetchall()
        numbers, first_ids, counts = np.array([row[:3] for row in documents], np.int64).reshape(-1, 3).T
        extents = connection.execute("SELECT first_id, entries, shard, row FROM extents ORDER BY first_id").fetchall()
        runs = _overlap(first_ids, counts, np.array(extents, np.int64).reshape(-1, 4))
        return Entries(Documents(numbers, first_ids, counts, [row[3] for row in documents]), runs, self.shards)

    @property
    def digest(self) -> str:
        """Stands for what can be found here: two memories that answer every search alike have the same."""
        with self.catalogue.read() as connection:
            batches = connection.execute("SELECT source, first_id FROM batches WHERE finished ORDER BY id").fetchall()
            alive = connection.execute(
                "SELECT first_id, entries FROM documents WHERE forgotten IS NULL ORDER BY first_id"
            ).fetchall()
        return digest_of_json([self.identity, batches, alive])

    def versions(self) -> list[Version]:
        with self.catalogue.read() as connection:
            return [Version(*row) for row in connection.execute("SELECT version, at, what FROM versions ORDER BY 1")]

    def remembers(self, source: dict[str, Any]) -> bool:
        """Whether something of `source` is alive."""
        return self.first_id(source) is not None

    def first_id(self, source: dict[str, Any]) -> int | None:
        """The entry of position 0 of what was remembered from `source`; None if nothing of it is alive."""
        with self.catalogue.read() as connection:
            row = connection.execute(
                "SELECT first_id FROM batches WHERE source = ? AND finished AND EXISTS "
                "(SELECT 1 FROM documents WHERE batch = batches.id AND forgotten IS NULL) ORDER BY id DESC",
                [json.dumps(source, sort_keys=True)],
            ).fetchone()
        return None if row is None else row[0]

    def lineage(self) -> list[str]:
        """One digest for the kind of keys, and one for each batch. It only grows: what was made from a memory fits it
        as long as the lineage it had then is the beginning of the one it has now."""
        with self.catalogue.read() as connection:
            batches = connection.execute("SELECT source, first_id FROM batches WHERE finished ORDER BY id").fetchall()
        return [digest_of_json([self.identity, self._files]), *map(digest_of_json, batches)]

    # Changing it

    def forget(self, names: list[str]) -> int:
        """No search finds entries of these documents from now on. Returns how many documents that were."""
        with only_writer(self.directory), self.catalogue.change() as connection:
            count = 0
            for name in names:
                known = "SELECT count(*) FROM documents WHERE name = ? AND forgotten IS NULL"
                found = connection.execute(known, [name]).fetchone()[0]
                if not found:
                    raise InputError(self._unknown(name, connection))
                count += found
            version = note_version(connection, f"forgot {count} document(s)")
            connection.executemany(
                "UPDATE documents SET forgotten = ? WHERE name = ? AND forgotten IS NULL",
                [(version, name) for name in names],
            )
        return count

    def _unknown(self, name: str, connection: sqlite3.Connection) -> str:
        names = [row[0] for row in connection.execute("SELECT name FROM documents WHERE forgotten IS NULL LIMIT 10000")]
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"`spalm show {self.directory} --documents` lists them"
        return f"{self.directory} remembers no document {name!r}; {hint}"

    def compact(self) -> int:
        """Rewrites shards that hold forgotten entries, or are small, and removes the old. Returns the bytes freed."""
        with only_writer(self.directory):
            self.clear_leftovers()
            before = self._bytes()
            entries = self.entries()
            self._rewrite(entries, self._worth_rewriting(entries))
            self.catalogue.vacuum()
            self.clear_leftovers()
            return before - self._bytes()

    def _worth_rewriting(self, entries: Entries) -> list[int]:
        """Shards with dead entries; and all small ones, if there are several."""
        alive = {int(shard): 0 for shard in entries._runs[:, 2]}
        for _, count, shard, _ in entries._runs.tolist():
            alive[shard] += count
        with self.catalogue.read() as connection:
            sizes = dict(connection.execute("SELECT id, entries FROM shards WHERE batch IS NULL"))
        dying = {shard for shard, size in sizes.items() if alive.get(shard, 0) < size}
        small = {shard for shard, size in sizes.items() if 2 * size < self.entries_per_shard}
        return sorted(dying | small if len(small) > 1 else dying)

    def _rewrite(self, entries: Entries, old: list[int]) -> None:
        runs = entries._runs[np.isin(entries._runs[:, 2], old)]
        shards, extents, checked = [], [], set[int]()
        for piece in _pieces(runs, self.entries_per_shard):
            shard = self.next_shard() + len(shards)
            for number in {number for _, _, number, _ in piece} - checked:
                self._check_shard(number)
                checked.add(number)
            keys = np.concatenate([self.shards.read("keys", number, row, count) for _, count, number, row in piece])
            tokens = np.concatenate([self.shards.read("tokens", number, row, count) for _, count, number, row in piece])
            shards.append((shard, len(keys), *self.write_shard(shard, keys, tokens)))
            rows = np.cumsum([0] + [count for _, count, _, _ in piece])
            extents += [(shard, int(row), first, count) for row, (first, count, _, _) in zip(rows, piece)]
        with self.catalogue.change() as connection:
            forgotten = connection.execute("SELECT count(*) FROM documents WHERE forgotten IS NOT NULL").fetchone()[0]
            if old or forgotten:
                note_version(connection, f"compacted {len(old)} shard(s) into {len(shards)}")
            connection.executemany("DELETE FROM extents WHERE shard = ?", [(shard,) for shard in old])
            connection.executemany("DELETE FROM shards WHERE id = ?", [(shard,) for shard in old])
            connection.execute("DELETE FROM documents WHERE forgotten IS NOT NULL")
            connection.executemany(
                "INSERT INTO shards (id, entries, keys_sha256, tokens_sha256) VALUES (?, ?, ?, ?)", shards
            )
            connection.executemany("INSERT INTO extents VALUES (?, ?, ?, ?)", extents)

    # Shards

    @property
    def entries_per_shard(self) -> int:
        return max(1, SHARD_BYTES // (2 * self.width))

    def next_shard(self) -> int:
        with self.catalogue.read() as connection:
            row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'shards'").fetchone()
        return 1 + (row[0] if row else 0)

    def write_shard(self, shard: int, keys: np.ndarray, tokens: np.ndarray) -> tuple[str, str]:
        """Puts a shard's files on disk, synced, and returns their digests. It counts once the catalogue names it."""
        digests, mark = [], f".{secrets.token_hex(4)}"  # a worker that was given up may still be writing the same
        for what, array in (("keys", keys), ("tokens", tokens)):
            content = np.ascontiguousarray(array, self.shards.kinds[what][0]).tobytes()
            write_atomically(self.shards.path(what, shard), content, mark=mark)
            digests.append(hashlib.sha256(content).hexdigest())
        folder = os.open(self.shards.folder, os.O_RDONLY)
        os.fsync(folder)  # the catalogue must not name files whose own names a power cut can still undo
        os.close(folder)
        return digests[0], digests[1]

    def clear_leftovers(self) -> None:
        """Removes shard files that the catalogue does not name: what a crash left of a change that did not happen."""
        with self.catalogue.read() as connection:
            named = {row[0] for row in connection.execute("SELECT id FROM shards")}
        for path in self.shards.folder.iterdir():
            ours = _SHARD_FILE.fullmatch(path.name)
            if ours and (ours[2] or int(ours[1]) not in named):
                path.unlink()

    def _bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())

    def verify(self) -> int:
        """Reads every byte and compares it with its digest. Returns how many bytes that were."""
        self.catalogue.verify()
        for name, digest in self._files.items():
            _check(self.directory / name, digest)
        with self.catalogue.read() as connection:
            shards = [row[0] for row in connection.execute("SELECT id FROM shards")]
        for shard in shards:
            self._check_shard(shard)
        return self._bytes()

    def _check_shard(self, shard: int) -> None:
        with self.catalogue.read() as connection:
            digests = "SELECT keys_sha256, tokens_sha256 FROM shards WHERE id = ?"
            keys, tokens = connection.execute(digests, [shard]).fetchone()
        _check(self.shards.path("keys", shard), keys)
        _check(self.shards.path("tokens", shard), tokens)


def as_keys(vectors: Float[Tensor, "n width"]) -> Float[np.ndarray, "n width"]:
    """Vectors in half precision; what does not fit is refused, not stored as infinity."""
    if not torch.isfinite(keys := vectors.half()).all():
        raise InputError("a hidden state does not fit float16; take a model that normalises its output")
    return keys.cpu().numpy()


def is_memory(directory: Path) -> bool:
    return (directory / IDENTITY).exists()


def describe(memory: Memory) -> dict[str, Any]:
    """What a memory is and holds."""
    entries = memory.entries()
    versions = memory.versions()
    return {
        **memory.identity,
        "entries": len(entries),
        "documents": len(entries.documents_held),
        "version": versions[-1].version,
        "digest": memory.digest,
    }


def note_version(connection: sqlite3.Connection, what: str) -> int:
    """Every change that a search could see, or that moves bytes, is a version."""
    connection.execute(
        "INSERT INTO versions SELECT max(version) + 1, datetime('now'), ? FROM versions",
        [what],
    )
    return connection.execute("SELECT max(version) FROM versions").fetchone()[0]


def _check(path: Path, digest: str) -> None:
    if not path.exists() or digest_of_file(path) != digest:
        state = "is damaged (its digest differs)" if path.exists() else "is missing"
        raise InputError(f"{path} {state}; restore it from a copy, or remove the memory and remember again")


def _overlap(first_ids: np.ndarray, counts: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """The parts of extents (first id, entries, shard, row) that belong to live documents, joined where they touch."""
    # Documents that follow each other without a gap are one interval of ids.
    gaps = np.flatnonzero(first_ids[1:] != first_ids[:-1] + counts[:-1]) + 1
    begins = first_ids[np.concatenate([[0], gaps])] if len(first_ids) else first_ids
    ends = (first_ids + counts)[np.concatenate([gaps - 1, [-1]])] if len(first_ids) else first_ids
    runs = []
    for first, count, shard, row in extents.tolist():
        interval = int(np.searchsorted(ends, first, side="right"))
        while interval < len(begins) and begins[interval] < first + count:
            begin, end = max(first, int(begins[interval])), min(first + count, int(ends[interval]))
            if end > begin:
                runs.append((begin, end - begin, shard, row + begin - first))
            interval += 1
    return np.array(runs, np.int64).reshape(-1, 4)


def _pieces(runs: np.ndarray, size: int) -> list[list[list[int]]]:
    """Runs in groups of at most `size` entries, long runs cut."""
    groups: list[list[list[int]]] = []
    room = 0
    for first, count, shard, row in runs.tolist():
        while count:
            if not room:
                groups.append([])
                room = size
            taken = min(room, count)
            groups[-1].append([first, taken, shard, row])
            first, count, row, room = first + taken, count - taken, row + taken, room - taken
    return groups
