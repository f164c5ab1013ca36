"""The catalogue of a memory: which documents it holds, under which ids, in which shards. One SQLite file.

A change is a transaction, so a crash leaves the memory as it was before or after the change. A second file holds the
digest of the first, by which `verify` finds any flipped byte; `pending` marks a change whose digest is not written yet.
A catalogue that somebody else made is read only if it has exactly our tables, with values of the right types in them.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from spalm.digests import digest_of_file
from spalm.files import open_regular, read_text, write_atomically
from spalm.memory.sqlite import connect, damaged, explained

_FILE, _DIGEST, _PENDING = "catalogue.sqlite", "catalogue.sha256", "catalogue.pending"
"""Files of the catalogue: the database, its digest, and the mark of a change whose digest is not written yet."""

_LARGEST_PAGE = 1 << 16
"""Bytes of a page of the database where its header says 1."""
_COUNTER = 4, 24
"""Number of bytes, and offset, of the counter in the file's header that every change increases."""
_TABLES = """
CREATE TABLE batches (                  -- documents remembered together, read as one stream
    id INTEGER PRIMARY KEY,
    source TEXT NOT NULL,               -- JSON: what was read, and how
    first_id INTEGER NOT NULL,          -- entry of its first position
    entries INTEGER NOT NULL,
    finished INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE documents (
    id INTEGER PRIMARY KEY,
    batch INTEGER NOT NULL REFERENCES batches,
    name TEXT NOT NULL,
    first_id INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    forgotten INTEGER                   -- the version from which on no search may find it
);
CREATE INDEX documents_by_name ON documents (name);
CREATE TABLE shards (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    batch INTEGER REFERENCES batches,   -- while that is being written
    entries INTEGER NOT NULL,
    keys_sha256 TEXT NOT NULL,          -- empty: its entries have no keys
    tokens_sha256 TEXT NOT NULL
);
CREATE TABLE extents (                  -- entries first_id ... first_id + entries - 1 are rows of a shard
    shard INTEGER NOT NULL REFERENCES shards,
    row INTEGER NOT NULL,
    first_id INTEGER NOT NULL,
    entries INTEGER NOT NULL
);
CREATE TABLE versions (
    version INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    what TEXT NOT NULL
);
"""
"""Schema of the database."""
_BAD_ROWS = """
SELECT 1 FROM batches WHERE typeof(source) <> 'text' OR typeof(finished) <> 'integer'
    OR typeof(first_id) <> 'integer' OR typeof(entries) <> 'integer' OR min(first_id, entries) < 0
    OR max(first_id, entries) > 1 << 48
UNION ALL SELECT 1 FROM documents WHERE typeof(batch) <> 'integer' OR typeof(name) <> 'text'
    OR typeof(first_id) <> 'integer' OR typeof(entries) <> 'integer' OR min(first_id, entries) < 0
    OR max(first_id, entries) > 1 << 48 OR typeof(forgotten) NOT IN ('integer', 'null')
UNION ALL SELECT 1 FROM shards WHERE typeof(batch) NOT IN ('integer', 'null') OR typeof(entries) <> 'integer'
    OR typeof(keys_sha256) <> 'text' OR typeof(tokens_sha256) <> 'text' OR min(id, entries) < 0
    OR max(id, entries) > 1 << 48
UNION ALL SELECT 1 FROM extents WHERE typeof(shard) <> 'integer' OR typeof(row) <> 'integer'
    OR typeof(first_id) <> 'integer' OR typeof(entries) <> 'integer' OR min(row, first_id, entries) < 0
    OR max(row, first_id, entries) > 1 << 48 OR row + entries > (SELECT entries FROM shards WHERE id = shard)
    OR shard NOT IN (SELECT id FROM shards)
UNION ALL SELECT 1 FROM versions WHERE typeof(at) <> 'text' OR typeof(what) <> 'text'
UNION ALL SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM versions)
LIMIT 1
"""
"""Query that finds a row whose values cannot be right, if there is one."""


class Catalogue:
    """The catalogue in a memory's directory. The file is opened for each query, so every result is up to date."""

    FILES = (_FILE, f"{_FILE}-journal", _DIGEST, _PENDING)
    """Names of its files."""
    MARKS = (f"{_FILE}-journal", _PENDING)
    """Those that are there only while something is changed, or after a crash."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.path = directory / _FILE
        self._checked: tuple[int, ...] | None = None
        """Size and times of the file when its rows were last checked."""

    @classmethod
    def create(cls, directory: Path) -> "Catalogue":
        """Makes an empty catalogue."""
        made = cls(directory)
        with made.change() as connection:
            for statement in _TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute("INSERT INTO versions VALUES (0, datetime('now'), 'made')")
        return made

    def stamp(self) -> tuple[int, int, bytes]:
        """Returns what is another one after every change of the file: its number, its size, and SQLite's own counter.

        It takes microseconds. While a change is being written it may be either the old or the new one.
        """
        file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(file)
            return state.st_ino, state.st_size, os.pread(file, *_COUNTER)
        finally:
            os.close(file)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Opens one consistent view of the catalogue."""
        with explained(self.path), closing(connect(self.path, _TABLES)) as connection:
            connection.execute("BEGIN")
            self._check_rows(connection)
            yield connection
            connection.rollback()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Opens a transaction: what is done inside takes effect as a whole, or not at all."""
        pending = self.directory / _PENDING
        unsealed = pending.exists()
        if self.path.exists() and not unsealed:
            self.verify()  # otherwise a new digest would hide the damage
        self._mark_pending()
        tables = _TABLES if self.path.exists() else None
        with explained(self.path), closing(connect(self.path, tables)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if tables:
                    self._check_rows(connection)
                yield connection
            except BaseException:
                connection.rollback()
                if not unsealed:
                    pending.unlink()
                raise
            connection.commit()
        self.seal()

    def next_shard(self) -> int:
        """Returns the number of the next shard; numbers are never used again."""
        with self.read() as connection:
            row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'shards'").fetchone()
        return 1 + (row[0] if row else 0)

    def shard_numbers(self) -> list[int]:
        """Returns the numbers of all shards."""
        with self.read() as connection:
            return [row[0] for row in connection.execute("SELECT id FROM shards")]

    def vacuum(self) -> None:
        """Rewrites the file without what was deleted from it."""
        self._mark_pending()
        with explained(self.path), closing(connect(self.path, _TABLES)) as connection:
            connection.execute("VACUUM")
        self.seal()

    def _mark_pending(self) -> None:
        """Marks that the digest is not that of the file until `seal`."""
        os.close(os.open(self.directory / _PENDING, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))

    def _check_rows(self, connection: sqlite3.Connection) -> None:
        """Refuses a catalogue with values that cannot be right, unless this very file was checked before."""
        found = self.path.stat()
        stamp = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if stamp != self._checked:
            if connection.execute(_BAD_ROWS).fetchone() is not None:
                raise damaged(self.path)
            self._checked = stamp

    def seal(self) -> None:
        """Writes the digest of the file as it is now."""
        write_atomically(self.directory / _DIGEST, digest_of_file(self.path) + "\n")
        (self.directory / _PENDING).unlink(missing_ok=True)

    def settle(self) -> None:
        """Checks the file; after a crash it brings it into the form that it has when nothing is being changed."""
        self.verify()
        if (self.directory / _PENDING).exists():
            self.seal()

    def _has_its_length(self) -> bool:
        """Returns whether the file has as many bytes as its header says; one with a hole may take hours to read."""
        with open_regular(self.path) as file:
            header, length = file.read(100), os.fstat(file.fileno()).st_size
        page = int.from_bytes(header[16:18], "big")
        return int.from_bytes(header[28:32], "big") * (page if page > 1 else _LARGEST_PAGE) == length

    def verify(self) -> None:
        """Compares the file with its digest; if a crash came before the digest was written, uses SQLite's own check."""
        if (self.directory / _PENDING).exists():
            with self.read() as connection:
                problems = [row[0] for row in connection.execute("PRAGMA integrity_check")]
            if problems != ["ok"]:
                raise damaged(self.path)
        elif not self._has_its_length() or f"{digest_of_file(self.path)}\n" != read_text(
            self.directory / _DIGEST, 1 << 10
        ):
            raise damaged(self.path)


def drop_unfinished_batch(connection: sqlite3.Connection) -> bool:
    """Drops the batch that is being written, and its shards, if there is one; returns whether there was."""
    unfinished = "(SELECT id FROM batches WHERE NOT finished)"
    shards = f"(SELECT id FROM shards WHERE batch IN {unfinished})"
    connection.execute(f"DELETE FROM extents WHERE shard IN {shards}")
    connection.execute(f"DELETE FROM shards WHERE batch IN {unfinished}")
    return connection.execute("DELETE FROM batches WHERE NOT finished").rowcount > 0


def record_version(connection: sqlite3.Connection, description: str) -> int:
    """Adds a version and returns its number. Every change that a search could see, or that moves entries, makes one."""
    connection.execute(
        "INSERT INTO versions SELECT max(version) + 1, datetime('now'), ? FROM versions",
        [description],
    )
    return connection.execute("SELECT max(version) FROM versions").fetchone()[0]
