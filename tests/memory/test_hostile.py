"""Memories that somebody else made, to harm: refused in a line, and nothing outside of them is touched."""

import json
import os
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from spalm.digests import digest_of_file, digest_of_json
from spalm.errors import InputError
from spalm.memory import Memory, describe_memory, remember, source_of_text
from spalm.memory.exact import reversed_context
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

ENCODER = StubEncoder()
ENDLESS = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n)"


def add(memory: Memory, texts: dict[str, list[int]]) -> None:
    remember(memory, ENCODER, stream(texts), source=source_of_text(stream(texts)))


@pytest.fixture
def memory(tmp_path) -> Memory:
    made = new_memory(tmp_path / "memory", ENCODER)
    add(made, random_texts(np.random.default_rng(3), 5))
    return made


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


def change(memory: Memory, *statements: str) -> None:
    """Changes a catalogue by hand, and its digest with it."""
    connection = sqlite3.connect(memory.catalogue.path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    memory.catalogue.seal()


def uses(memory: Memory) -> list:
    return [
        lambda: describe_memory(Memory(memory.directory)),
        lambda: Memory(memory.directory).forget(["text-1"]),
        lambda: Memory(memory.directory).compact(),
        lambda: Memory(memory.directory).exact.current(),
    ]


@pytest.mark.parametrize(
    "statements",
    [
        ["DROP TABLE versions", f"CREATE VIEW versions AS {ENDLESS} SELECT id version, '' at, '' what FROM n"],
        ["ALTER TABLE documents RENAME TO d", f"CREATE VIEW documents AS {ENDLESS} SELECT * FROM n, d"],
        ["CREATE TRIGGER t AFTER UPDATE ON documents BEGIN DELETE FROM shards; END"],
        ["CREATE TABLE more (x)"],
        ["ALTER TABLE versions ADD COLUMN more AS (version + 1)"],
        ["PRAGMA journal_mode = WAL"],
        ["UPDATE documents SET entries = -1"],
        ["UPDATE documents SET entries = 1 << 62"],
        ["UPDATE documents SET first_id = 'x'"],
        ["UPDATE documents SET name = x'ff00'"],
        ["UPDATE documents SET name = CAST(x'ff00' AS TEXT)"],
        ["UPDATE batches SET source = x'00'"],
        ["UPDATE extents SET row = 5"],
        ["UPDATE extents SET shard = 77"],
        ["UPDATE extents SET first_id = 1.5"],
        ["DELETE FROM versions"],
    ],
    ids=lambda statements: statements[-1][:40],
)
def test_a_catalogue_of_another_form_is_refused(memory, statements):
    change(memory, "PRAGMA foreign_keys = OFF", *statements)
    for use in uses(memory):
        with pytest.raises(InputError) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_a_catalogue_with_a_hole_behind_it_is_not_read(memory):
    """It takes no space, and hours to read."""
    os.truncate(memory.catalogue.path, 1 << 42)
    for use in (lambda: Memory(memory.directory).verify(), lambda: Memory(memory.directory).forget(["text-1"])):
        with pytest.raises(InputError, match="damaged"):
            use()


def test_documents_that_share_entries_are_refused(memory):
    change(memory, "UPDATE documents SET first_id = 0")
    with pytest.raises(InputError, match="damaged"):
        describe_memory(Memory(memory.directory))


def test_pages_that_lead_to_themselves_do_not_run_without_end(memory):
    """A tree whose every branch is the same page has more rows than anybody can count."""
    add(memory, {f"name-{'x' * 300}-{number}": [1] for number in range(100)})
    content = bytearray(memory.catalogue.path.read_bytes())
    size = int.from_bytes(content[16:18], "big")
    root = (
        sqlite3.connect(memory.catalogue.path)
        .execute("SELECT rootpage FROM sqlite_schema WHERE name = 'documents'")
        .fetchone()[0]
    )
    start = (root - 1) * size
    assert content[start] == 5  # an inner page
    for cell in range(int.from_bytes(content[start + 3 : start + 5], "big")):
        place = start + int.from_bytes(content[start + 12 + 2 * cell : start + 14 + 2 * cell], "big")
        content[place : place + 4] = root.to_bytes(4, "big")
    memory.catalogue.path.write_bytes(content)
    memory.catalogue.seal()
    ended = threading.Event()

    def use() -> None:
        for each in uses(memory):
            with pytest.raises(InputError, match="damaged"):
                each()
        ended.set()

    threading.Thread(target=use, daemon=True).start()
    assert ended.wait(60)


@pytest.mark.parametrize(
    "name",
    ["catalogue.sqlite-journal", "catalogue.sqlite-wal", "catalogue.pending", "exact/new", "shards/link", "notes"],
)
def test_nothing_is_written_through_a_link(memory, victim, name):
    path = memory.directory / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    for use in (lambda: memory.forget(["text-1"]), memory.compact, lambda: add(memory, {"new": [1, 2]})):
        with pytest.raises(InputError, match="symbolic link"):
            use()


@pytest.mark.parametrize("name", ["memory.json.tmp", "catalogue.sha256.tmp", "catalogue.sha256"])
def test_a_link_under_a_temporary_name_is_not_followed(memory, victim, name):
    path = memory.directory / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    with pytest.raises(InputError, match="symbolic link"):
        memory.forget(["text-1"])


@pytest.mark.parametrize("folder", ["exact", "shards"])
def test_folders_that_are_links_are_neither_read_nor_emptied(memory, tmp_path, folder):
    victim = tmp_path / "mine"
    (memory.directory / folder).rename(victim)
    (victim / "photographs").mkdir()
    (memory.directory / folder).symlink_to(victim)
    before = sorted(victim.rglob("*"))
    for use in (lambda: memory.compact(), lambda: Memory(memory.directory).forget(["text-1"])):
        with pytest.raises(InputError, match="symbolic link"):
            use()
    assert sorted(victim.rglob("*")) == before


def test_a_journal_that_names_another_file_does_not_delete_it(memory, victim):
    """SQLite deletes the journal of several databases that a journal names, once it is done with it."""
    name = str(victim).encode()
    check = sum(name) & 0xFFFFFFFF
    header = bytes.fromhex("d9d505f920a163d7") + (0).to_bytes(4, "big") + bytes(4)
    header += (1).to_bytes(4, "big") + (512).to_bytes(4, "big") + (4096).to_bytes(4, "big")
    end = bytes(4) + name + len(name).to_bytes(4, "big") + check.to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
    (memory.directory / "catalogue.sqlite-journal").write_bytes(header.ljust(512, b"\0") + end)
    with pytest.raises(InputError, match="damaged"):
        memory.versions()


@pytest.mark.parametrize("name", ["catalogue.sqlite", "memory.json", "catalogue.sha256", "shards/00000001.tokens"])
def test_pipes_and_devices_do_not_block(memory, name):
    path = memory.directory / name
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        path.unlink()
        make()
        with pytest.raises(InputError):
            Memory(memory.directory).verify()
        if "shards" not in name:
            with pytest.raises(InputError):
                Memory(memory.directory).forget(["text-1"])


@pytest.mark.parametrize("column", ["keys", "tokens"])
def test_shards_of_another_size_or_elsewhere_are_not_read(memory, tmp_path, monkeypatch, column):
    """A hole takes no space, and hours to read."""
    path = memory.shards.path(column, 1)
    path.rename(tmp_path / "mine")
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="leads out of"):
        Memory(memory.directory).verify()
    path.unlink()
    (tmp_path / "mine").rename(path)
    Memory(memory.directory).verify()
    os.truncate(path, path.stat().st_size + 8)
    read = []

    def noting(path: Path) -> str:
        read.append(path.name)
        return digest_of_file(path)

    monkeypatch.setattr("spalm.memory.verification.digest_of_own_file", noting)
    with pytest.raises(InputError, match=f"{path.name} is damaged"):
        Memory(memory.directory).verify()
    assert path.name not in read


@pytest.mark.parametrize("token", [-1, 50, 1 << 30])
def test_tokens_outside_of_the_vocabulary_are_refused(memory, token):
    path = memory.shards.path("tokens", 1)
    tokens = np.fromfile(path, "<i4")
    tokens[2] = token
    tokens.tofile(path)
    change(memory, f"UPDATE shards SET tokens_sha256 = '{digest_of_file(path)}' WHERE id = 1")
    entries = Memory(memory.directory).entries()
    rows = np.arange(9)
    for use in (lambda: entries.tokens(0, 9), lambda: entries.take_tokens(rows), lambda: entries.tokens_of(rows)):
        with pytest.raises(InputError, match="not in the vocabulary"):
            use()


@pytest.mark.parametrize("name", ["suffixes", "text", "starts", "borders", "lengths", "first_ids"])
@pytest.mark.parametrize("value", [0, 1 << 14, 1 << 30, -5, -(1 << 30)])
def test_sorted_contexts_with_any_numbers_do_not_end_the_process(memory, name, value):
    """Compiled loops do not check where they read."""
    shard = next(path for path in memory.exact.folder.iterdir() if path.is_dir())
    manifest = json.loads((shard / "manifest.json").read_text())
    numbers = np.fromfile(shard / name, manifest["files"][name]["dtype"])
    numbers[:] = np.array(value).astype(numbers.dtype)
    numbers.tofile(shard / name)
    manifest["files"][name]["sha256"] = digest_of_file(shard / name)
    (shard / "manifest.json").write_text(json.dumps(manifest))
    (shard / "SHA256SUMS").unlink()
    shards = {shard.name: digest_of_json(manifest)}
    content = {"shards": shards, "sha256": digest_of_json(shards)}
    (memory.exact.folder / "shards.json").write_text(json.dumps(content))
    opened = Memory(memory.directory)
    tokens = opened.entries().tokens(0, 30)
    try:
        view = opened.exact.current()
        view.find(reversed_context(tokens[:9].tolist()))
        view.trace(tokens)
    except InputError:
        pass


def test_a_commit_is_on_the_disk_when_it_returns(memory):
    with memory.catalogue.change() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA: the folder too
        assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)


def test_a_change_that_must_be_undone_where_nothing_can_be_written_is_told(memory, monkeypatch):
    def cannot(*_, **__):
        error = sqlite3.OperationalError("attempt to write a readonly database")
        error.sqlite_errorname = "SQLITE_READONLY_ROLLBACK"
        raise error

    (memory.directory / "catalogue.sqlite-journal").write_bytes(bytes(512))
    monkeypatch.setattr("spalm.memory.sqlite.sqlite3.connect", cannot)
    with pytest.raises(InputError, match=r"crash interrupted.*cannot be written; make it writable"):
        memory.versions()
