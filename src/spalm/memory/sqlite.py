"""SQLite files that somebody else may have made: opened only if they are plain, and read for a bounded time.

SQL in a file could run without end (a view), on every change (a trigger), or lead to other files (a journal that names
another): a file with anything but our own tables, or with a journal that is not ours, is refused.
"""

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from spalm.errors import DamagedError, InputError, InUseError
from spalm.files import open_regular

_BESIDE = ("-journal", "-wal", "-shm")
"""Ends of the names of files that SQLite keeps beside a database."""
_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a journal that names a journal of several databases, which SQLite would delete."""
_JOURNAL_MODE = slice(18, 20)
"""Bytes of the header that say whether changes go to a journal (1) or to a write-ahead log (2)."""
_STEP = 100_000
"""Instructions of SQLite between two looks at how many there were."""
_PER_BYTE, _PER_CHANGE, _ANYWAY = 200, 2_000, 5_000_000
"""Instructions that a connection may take: for each byte of the file, for each changed row, and in any case."""


def connect(path: Path, tables: str | None) -> sqlite3.Connection:
    """Opens a database such that commits are synced to disk and deleted content is overwritten.

    `tables` is the SQL that made its tables; None: it is to be made.
    """
    if tables is not None:
        _refuse_unusual(path)
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        for setting in ("synchronous = EXTRA", "secure_delete = ON", "foreign_keys = ON", "trusted_schema = OFF"):
            connection.execute(f"PRAGMA {setting}")
        connection.execute("PRAGMA cell_size_check = ON")
        if tables is not None:
            _limit(connection, path.stat().st_size)
            if _schema(connection) != _schema_of(tables):
                raise damaged(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_unusual(path: Path) -> None:
    """Refuses a database that is a link, or has a log or a journal that we would not have written."""
    for file in (path, *(path.with_name(path.name + end) for end in _BESIDE)):
        if file.is_symlink():
            raise InputError(f"{file} is a symbolic link; put the file itself there, or remove the link")
    with open_regular(path) as file:
        if 2 in file.read(100)[_JOURNAL_MODE]:
            raise damaged(path)
    journal = path.with_name(path.name + _BESIDE[0])
    with suppress(FileNotFoundError), open_regular(journal) as file:  # another process may end its change meanwhile
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_NAMES_ANOTHER)))
        if file.read() == _NAMES_ANOTHER:
            raise damaged(path)


def _limit(connection: sqlite3.Connection, size: int) -> None:
    """Has SQLite give up after more instructions than a file of this size can need."""
    steps = 0

    def too_many() -> bool:
        nonlocal steps
        steps += _STEP
        return steps > _ANYWAY + _PER_BYTE * size + _PER_CHANGE * connection.total_changes

    connection.set_progress_handler(too_many, _STEP)


def _schema(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Returns type, name and SQL of everything in a database."""
    found = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_schema ORDER BY 1, 2").fetchall()
    return [(kind, name, _without_comments(sql)) for kind, name, sql in found]


@lru_cache
def _schema_of(tables: str) -> list[tuple[str, str, str]]:
    """Returns the same of a database that has just been made."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(tables)
        return _schema(connection)


@lru_cache
def _without_comments(sql: str) -> str:
    """Returns SQL without comments, its white space in one form."""
    return " ".join(re.sub(r"--[^\n]*", "", sql).split())


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into ones that a user can act on."""
    try:
        yield
    except sqlite3.OperationalError as error:
        name = getattr(error, "sqlite_errorname", "")
        if "full" in str(error) or "I/O" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        if "locked" in str(error):
            raise InUseError(f"{path} is in use by another process; try again when it is done") from None
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            raise _unwritable(path) from None
        raise damaged(path) from error
    except sqlite3.DatabaseError as error:
        raise damaged(path) from error


def _unwritable(path: Path) -> InputError:
    """Returns the error that reports a file that cannot be written, but must be."""
    if path.with_name(path.name + _BESIDE[0]).exists():
        return InputError(
            f"{path} has a change that a crash interrupted and that must be undone first, but {path.parent} cannot be "
            "written; make it writable, or copy it to where it is"
        )
    return InputError(f"{path} cannot be written; make {path.parent} writable, or copy it to where it is")


def damaged(path: Path) -> DamagedError:
    """Returns the error that reports a damaged database."""
    return DamagedError(f"{path} is damaged; restore {path.parent} from a copy, or remove it and remember again")
