"""The catalogue of a memory: which documents it holds, under which ids, in which shards. One SQLite file.

A change is a transaction, so after a crash there is the memory before it or after it. Beside the file stands its
digest, by which `verify` finds any flipped byte; `pending` marks a change whose digest is not written yet.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from spalm.artifact import digest_of_file, write_atomically
from spalm.errors import InputError, InUse

FILE, DIGEST, PENDING = "catalogue.sqlite", "catalogue.sha256", "catalogue.pending"

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
    keys_sha256 TEXT NOT NULL,
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


class Catalogue:
    """Opens the file for each question, so that every answer is of what is there now."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.path = directory / FILE

    @classmethod
    def create(cls, directory: Path) -> "Catalogue":
        made = cls(directory)
        with made.change() as connection:
            for statement in _TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute("INSERT INTO versions VALUES (0, datetime('now'), 'made')")
        return made

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the catalogue."""
        with _explained(self.path), closing(_connect(self.path)) as connection:
            connection.execute("BEGIN")
            yield connection
            connection.rollback()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: what is done inside is there afterwards as a whole, or not at all."""
        pending = self.directory / PENDING
        unsealed = pending.exists()
        if self.path.exists() and not unsealed:
            self.verify()  # or the damage would be sealed as good
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

    def vacuum(self) -> None:
        """Rewrites the file without what was deleted from it."""
        (self.directory / PENDING).touch()
        with _explained(self.path), closing(_connect(self.path)) as connection:
            connection.execute("VACUUM")
        self.seal()

    def seal(self) -> None:
        """Writes the digest of the file as it is now."""
        write_atomically(self.directory / DIGEST, digest_of_file(self.path) + "\n")
        (self.directory / PENDING).unlink(missing_ok=True)

    def verify(self) -> None:
        """Compares the file with its digest; after a crash before that was written, with SQLite's own rules."""
        if (self.directory / PENDING).exists():
            with self.read() as connection:
                problems = [row[0] for row in connection.execute("PRAGMA integrity_check")]
            if problems != ["ok"]:
                raise _damaged(self.path)
        elif digest_of_file(self.path) != (self.directory / DIGEST).read_text(errors="replace").rstrip("\n"):
            raise _damaged(self.path)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors as the ones a user can mend."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error) or "I/O" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        if "locked" in str(error):
            raise InUse(f"{path} is in use by another process; try again when it is done") from None
        raise _damaged(path) from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is damaged; restore {path.parent} from a copy, or remove it and remember again")
