"""Files made to harm: JSON with values changed, catalogues with statements run on them, links, pipes and cut files.

Whoever makes such a file makes its digests too, so they are made again after each change.
"""

import copy
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spalm.digests import SUMS, digest_of_file, digest_of_json, read_sums, write_sums
from spalm.lm.pretrained import PretrainedFolder
from spalm.memory.memory import IDENTITY

DEEP = json.loads("[" * 60 + "]" * 60)
VALUES: list[Any] = [
    *(None, True, [], {}, [[]], {"": None}, DEEP, 0, -1, 1, 1.5, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 1e308),
    *(float("nan"), float("inf"), "", "x", "0" * 64, "f" * 64, "x" * 100_000, "a\0b", "\x1b[31m", "\u202e", "\ud800"),
    *("../victim", "/etc/hostname", "/dev/zero", "|O", ">i4", "<U8", "|V8", "<f4", "..", "%s", "${HOME}", "!!python/x"),
]
"""Values that stand where others belong."""
COLUMNS = {
    "batches": ("id", "source", "first_id", "entries", "finished"),
    "documents": ("id", "batch", "name", "first_id", "entries", "forgotten"),
    "shards": ("id", "batch", "entries", "keys_sha256", "tokens_sha256"),
    "extents": ("shard", "row", "first_id", "entries"),
    "versions": ("version", "at", "what"),
}
SQL_VALUES = (
    *("NULL", "-1", "0", "1", "3", "1.5", "1e300", "9223372036854775807", "-9223372036854775808", "281474976710656"),
    *("''", "'x'", "x'00ff'", "CAST(x'ff00' AS TEXT)", "char(27) || '[31m'", "'../victim'", "zeroblob(100000)"),
    *("hex(zeroblob(50000))", "'[' || char(10) || ']'"),
)
ENDLESS = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n)"
SCHEMES = (
    f"CREATE VIEW more AS {ENDLESS} SELECT id FROM n",
    "CREATE TRIGGER t AFTER UPDATE ON documents BEGIN DELETE FROM shards; END",
    "CREATE TRIGGER t AFTER INSERT ON versions BEGIN UPDATE documents SET forgotten = NULL; END",
    "CREATE TABLE more (x)",
    "CREATE INDEX more ON documents (entries)",
    "CREATE INDEX more ON documents (abs(entries))",
    "DROP INDEX documents_by_name",
    "ALTER TABLE versions ADD COLUMN more AS (version + 1)",
    "ALTER TABLE documents RENAME COLUMN name TO title",
    "PRAGMA journal_mode = WAL",
    "PRAGMA user_version = 77",
    "PRAGMA auto_vacuum = 1",
    "PRAGMA encoding = 'UTF-16le'",
)


def change_json(path: Path, random: np.random.Generator) -> str:
    """Changes a value somewhere in a JSON file, or its keys; returns what was done."""
    value = json.loads(path.read_text())
    places = list(_places(value))
    holder, key = places[int(random.integers(len(places)))]
    hostile = copy.deepcopy(VALUES[int(random.integers(len(VALUES)))])
    match random.integers(5):
        case 0:
            del holder[key]
            what = f"{key!r} removed"
        case 1 if isinstance(holder, dict):
            holder[str(hostile)[:200]] = holder.pop(key)
            what = f"{key!r} renamed {str(hostile)[:40]!r}"
        case _:
            holder[key] = hostile
            what = f"{key!r} = {str(hostile)[:40]!r}"
    path.write_text(json.dumps(value))
    return f"{what} in {path.name}"


def _places(value: Any) -> Any:
    """Yields every place in a JSON value at which another value can be put: what holds it, and where."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(inner):
        yield value, key
        yield from _places(each)


def change_text(path: Path, random: np.random.Generator) -> str:
    """Cuts a text file, repeats a part of it, or puts other bytes into it; returns what was done."""
    content = path.read_bytes()
    start, stop = sorted(random.integers(0, len(content) + 1, 2).tolist())
    noise = random.bytes(int(random.integers(1, 40)))
    what = str(random.choice(["cut", "repeated", "noise", "deep", "digits", "empty"]))
    parts = {
        "cut": content[:start],
        "repeated": content[:stop] + content[start:],
        "noise": content[:start] + noise + content[stop:],
        "deep": content[:start] + b"[" * 100_000 + content[start:],
        "digits": content[:start] + b"9" * 5000 + content[start:],
        "empty": b"",
    }
    path.write_bytes(parts[what])
    return f"{what} at {start} to {stop} of {path.name}"


def change_kind(path: Path, random: np.random.Generator, victim: Path) -> str:
    """Puts a link, a pipe, a folder or a huge hole in the place of a file; returns what was done."""
    makers: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": lambda: path.mkdir(),
        "link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "link to a file elsewhere": lambda: path.symlink_to(victim),
        "link to a folder elsewhere": lambda: path.symlink_to(victim.parent),
        "link to itself": lambda: path.symlink_to(path),
        "nothing": lambda: None,
        "hole": lambda: path.touch() or os.truncate(path, 1 << 40),
    }
    long = path.suffix in (".json", ".jsonl", ".yaml", ".sqlite")  # what else is large takes long to read
    what = str(random.choice(sorted(makers.keys() - (set() if long else {"hole"}))))
    path.unlink()
    makers[what]()
    return f"{what} instead of {path.name}"


def change_folder(folder: Path, random: np.random.Generator, victim: Path) -> str:
    """Puts a link in the place of a folder, or folders within one another without end; returns what was done."""
    inner = sorted(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())
    new = [folder / name for name in ("study", "report", "study/test", "index-2", "receipts", "notes")]
    path = [*inner, *new][int(random.integers(len(inner) + len(new)))]
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    what = str(random.choice(["elsewhere", "everything", "itself", "deep"]))
    if what == "deep":
        for _ in range(400):
            path.mkdir()
            path = path / "a"
    else:
        path.symlink_to({"elsewhere": victim.parent, "everything": Path("/"), "itself": path}[what])
    return f"{what} instead of the folder {path.relative_to(folder).parts[0]}"


def change_catalogue(path: Path, random: np.random.Generator) -> str:
    """Runs a statement on a catalogue, or changes bytes of its pages; returns what was done."""
    if random.integers(4) == 0:
        return change_pages(path, random)
    if random.integers(4) == 0:
        statement = str(random.choice(SCHEMES))
    else:
        table = str(random.choice(sorted(COLUMNS)))
        column, value = str(random.choice(COLUMNS[table])), str(random.choice(SQL_VALUES))
        where = "" if random.integers(2) else f" WHERE rowid = (SELECT max(rowid) FROM {table})"
        statement = f"UPDATE OR IGNORE {table} SET {column} = {value}{where}"
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(statement)
        connection.commit()
    except sqlite3.Error as error:
        connection.rollback()
        statement += f" ({error})"
    finally:
        connection.close()
    return statement


def change_pages(path: Path, random: np.random.Generator) -> str:
    """Changes some bytes of a database's pages."""
    content = bytearray(path.read_bytes())
    places = random.integers(0, len(content), int(random.integers(1, 20))).tolist()
    if random.integers(2):
        places = [place // 4096 * 4096 + place % 40 for place in places]  # headers of pages
    for place in places:
        content[min(place, len(content) - 1)] = int(random.integers(256))
    path.write_bytes(content)
    return f"bytes {places} of {path.name}"


def make_digests_again(folder: Path, path: Path) -> None:
    """Makes the digests of a changed file again wherever they are kept, as far as the file still can be read."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 30:
        return
    if path.name == "catalogue.sqlite":
        path.with_name("catalogue.sha256").write_text(digest_of_file(path) + "\n")
    if path.parent == folder / "model":
        _name_base(folder)
    if path.name == IDENTITY:
        _seal(path, lambda value: [value["format"], value["identity"], value["files"]])
    if path.name == "shards.json":
        _seal(path, lambda value: value["shards"])
    if (path.parent / SUMS).exists() and path.name != SUMS:
        write_sums(path.parent, {**(read_sums(path.parent) or {}), path.name: digest_of_file(path)})
    outer = path.parent.parent / "shards.json"
    if path.name == "manifest.json" and outer.exists() and folder in outer.parents:
        value = json.loads(outer.read_text())
        try:
            value["shards"][path.parent.name] = digest_of_json(json.loads(path.read_text()))
        except (ValueError, RecursionError):
            return
        outer.write_text(json.dumps(value))
        _seal(outer, lambda value: value["shards"])


def _name_base(folder: Path) -> None:
    """Writes the digest of the base model in a folder where that is named."""
    path = folder / "attached.json"
    about = json.loads(path.read_text()) | {"digest": PretrainedFolder(folder / "model").digest()}
    path.write_text(json.dumps(about))
    if (folder / SUMS).exists():
        write_sums(folder, {**(read_sums(folder) or {}), path.name: digest_of_file(path)})


def _seal(path: Path, digested: Callable[[Any], Any]) -> None:
    """Writes the digest that a JSON file holds of its own content; one of another form has none."""
    try:
        value = json.loads(path.read_text())
        value["sha256"] = digest_of_json(digested(value))
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    path.write_text(json.dumps(value))
