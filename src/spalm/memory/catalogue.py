"""The catalogue of a memory: which documents it holds, under which ids, in which shards. One SQLite file.

A change is a transaction, so a crash leaves the memory as it was before or after the change. A second file holds the
digest of the first, by which `verify` finds any flipped byte; `pending` marks a change whose digest is not written yet.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from spalm.artifact import digest_of_file, write_atomically
from spalm.errors import InputError, InUseError

_FILE, _DIGEST, _PENDING = "catalogue.sqlite", "catalogue.sha256", "catalogue.pending"
"""Files of the catalogue: the database, its digest, and the mark of a change whose digest is not written yet."""

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


class Catalogue:
    """The catalogue in a memory's directory. The file is opened for each query, so every result is up to date."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.path = directory / _FILE

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
        file = os.open(self.path, os.O_RDONLY)
        try:
            state = os.fstat(file)
            return state.st_ino, state.st_size, os.pread(file, *_COUNTER)
        finally:
            os.close(file)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Opens one consistent view of the catalogue."""
        with _explained(self.path), closing(_connect(self.path)) as connection:
            connection.execute("BEGIN")
            yield connection
            connection.rollback()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Opens a transaction: what is done inside takes effect as a whole, or not at all."""
        pending = self.directory / _PENDING
        unsealed = pending.exists()
        if self.path.exists() and not unsealed:
            self.verify()  # otherwise a new digest would hide the damage
        pending.touch()
        with _explained(self.path), closing(_connect(self.path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
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
        (self.directory / _PENDING).touch()
        with _explained(self.path), closing(_connect(self.path)) as connection:
            connection.execute("VACUUM")
        self.seal()

    def seal(self) -> None:
        """Writes the digest of the file as it is now."""
        write_atomically(self.directory / _DIGEST, digest_of_file(self.path) + "\n")
        (self.directory / _PENDING).unlink(missing_ok=True)

    def verify(self) -> None:
        """Compares the file with its digest; if a crash came before the digest was written, uses SQLite's own check."""
        if (self.directory / _PENDING).exists():
            with self.read() as connection:
                problems = [row[0] for row in connection.execute("PRAGMA integrity_check")]
            if problems != ["ok"]:
                raise _damaged(self.path)
        elif digest_of_file(self.path) != (self.directory / _DIGEST).read_text(errors="replace").rstrip("\n"):
            raise _damaged(self.path)


def record_version(connection: sqlite3.Connection, description: str) -> int:
    """Adds a version and returns its number. Every change that a search could see, or that moves entries, makes one."""
    connection.execute(
        "INSERT INTO versions SELECT max(version) + 1, datetime('now'), ? FROM versions",
        [description],
    )
    return connection.execute("SELECT max(version) FROM versions").fetchone()[0]


def _connect(path: Path) -> sqlite3.Connection:
    """Opens the database such that commits are synced to disk and deleted content is overwritten."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into ones that a user can act on."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error) or "I/O" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        if "locked" in str(error):
            raise InUseError(f"{path} is in use by another process; try again when it is done") from None
        raise _damaged(path) from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> InputError:
    """Returns the error that reports a damaged catalogue."""
    return InputError(f"{path} is damaged; restore {path.parent} from a copy, or remove it and remember again")
