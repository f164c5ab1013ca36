"""What a memory holds, gives back, refuses and forgets."""

import gc
import json
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spalm import artifact
from spalm.compute import Execution
from spalm.errors import InputError
from spalm.memory import MISSING, Memory, remember, shards, source_of_text
from spalm.memory.catalogue import Catalogue
from support.commands import forks
from support.stub_memory import WIDTH, StubEncoder, new_memory, random_texts, stream

ENCODER = StubEncoder()


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2 * WIDTH * 40)


def add(memory: Memory, texts: dict[str, list[int]], encoder: StubEncoder = ENCODER, restart: bool = False) -> bool:
    text = stream(texts)
    return remember(memory, encoder, text, source=source_of_text(text), execution=Execution(restart=restart))


def contents(memory: Memory) -> dict[int, tuple[bytes, int, str, int]]:
    """Everything that can be found: id -> (key, token, document, offset)."""
    entries = memory.entries()
    found = {}
    keys, tokens, ids = (getattr(entries, name)(0, len(entries)) for name in ("keys", "tokens", "labels"))
    for key, token, id in zip(keys, tokens, ids):
        source = entries.source(int(id))
        found[int(id)] = key.tobytes(), int(token), source.document, source.offset
    return found


def expected(texts: dict[str, list[int]], first_id: int = 0) -> dict[int, tuple[bytes, int, str, int]]:
    tokens = np.array([token for text in texts.values() for token in text])
    keys = iter(ENCODER.of(tokens))
    places = [(token, name, offset) for name, text in texts.items() for offset, token in enumerate(text)]
    return {first_id + row: (next(keys).tobytes(), *place) for row, place in enumerate(places)}


@pytest.fixture
def texts():
    return random_texts(np.random.default_rng(3), 13)


@pytest.fixture
def memory(tmp_path, texts):
    made = new_memory(tmp_path / "memory", ENCODER)
    add(made, texts)
    return made


def test_every_position_has_key_token_and_source(memory, texts):
    assert contents(memory) == expected(texts)
    assert len(list(memory.shards.folder.glob("*.keys"))) > 3


def test_rows_and_ids_are_each_others_inverse(memory, texts):
    memory.forget(["text-2", "text-7"])
    entries = memory.entries()
    rows = np.arange(len(entries))
    np.testing.assert_array_equal(entries.rows(entries.ids(rows)), rows)
    total = sum(map(len, texts.values()))
    alive = set(entries.ids(rows).tolist())
    for id in range(-2, total + 2):
        assert (int(entries.rows(np.array(id))) >= 0) == (id in alive)
        assert entries.first_row(id) == sum(other < id for other in alive)
    assert set(entries.gaps(total).tolist()) == set(range(total)) - alive
    shuffled = np.random.default_rng(0).permutation(rows)
    np.testing.assert_array_equal(entries.take(shuffled), entries.keys(0, len(entries))[shuffled])
    np.testing.assert_array_equal(entries.take_tokens(shuffled), entries.tokens(0, len(entries))[shuffled])


def test_the_text_around_an_entry_stays_inside_its_document(memory, texts):
    entries = memory.entries()
    first = len(texts["text-0"])
    text = texts["text-1"]
    np.testing.assert_array_equal(entries.around(first, 5, 3), text[:4])
    np.testing.assert_array_equal(entries.around(first + len(text) - 1, 2, 9), text[-3:])


def test_ids_are_never_used_again(memory, texts):
    end = sum(map(len, texts.values()))
    memory.forget(list(texts))
    assert len(memory.entries()) == 0
    memory.compact()
    add(memory, {"later": [1, 2, 3]})
    assert list(contents(memory)) == [end, end + 1, end + 2]


def test_what_was_remembered_is_not_remembered_twice(memory, texts):
    before = memory.digest
    assert not add(memory, texts)
    assert memory.digest == before


def test_forgetting_and_compacting_remove_every_byte(memory, texts):
    secret = "text-5"
    memory.forget([secret])
    left = {id: entry for id, entry in expected(texts).items() if entry[2] != secret}
    assert contents(memory) == left
    digest, view = memory.digest, memory.entries()
    memory.compact()
    assert contents(memory) == left
    assert memory.digest == digest
    assert len(view) == len(left)
    everything = b"".join(path.read_bytes() for path in memory.directory.rglob("*") if path.is_file())
    assert secret.encode() not in everything
    assert sum(path.stat().st_size for path in memory.shards.folder.glob("*.keys")) == 2 * WIDTH * len(left)
    memory.verify()
    assert memory.compact() == 0


def test_versions_tell_the_story(memory):
    memory.forget(["text-1"])
    memory.compact()
    whats = [version.what.split()[0] for version in memory.versions()]
    assert whats == ["made", "remembered", "forgot", "compacted"]


def test_an_unknown_document_is_named(memory):
    before = contents(memory)
    with pytest.raises(InputError, match=r"no document 'text-99'; did you mean 'text-9'\?"):
        memory.forget(["text-1", "text-99"])
    assert contents(memory) == before


def test_another_reader_sees_a_forgotten_document_no_more(memory):
    other = Memory(memory.directory)
    assert any(entry[2] == "text-4" for entry in contents(other).values())
    memory.forget(["text-4"])
    assert not any(entry[2] == "text-4" for entry in contents(other).values())


@pytest.mark.parametrize(
    "other",
    [StubEncoder("another"), StubEncoder(width=WIDTH + 1), StubEncoder(vocabulary=51)],
    ids=["encoder", "width", "vocabulary"],
)
def test_keys_of_another_kind_are_refused(memory, other):
    before = contents(memory)
    with pytest.raises(InputError, match=r"holds keys of another kind .*encoder\."):
        add(memory, {"new": [1, 2]}, other)
    assert contents(memory) == before


def test_a_text_that_was_forgotten_may_come_back_under_new_ids(memory, texts):
    end = sum(map(len, texts.values()))
    note = {"note": [3, 4, 5]}
    add(memory, note)
    memory.forget(["note"])
    assert add(memory, note)
    assert [id for id, entry in contents(memory).items() if entry[2] == "note"] == [end + 3, end + 4, end + 5]


def test_a_refused_change_leaves_the_memory_sealed(memory):
    with pytest.raises(InputError):
        memory.forget(["nobody"])
    assert not (memory.directory / "catalogue.pending").exists()
    path = memory.directory / "catalogue.sqlite"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"text-5", b"text-S"))
    for change in (memory.verify, lambda: memory.forget(["text-1"])):
        with pytest.raises(InputError, match="damaged"):
            change()


def test_any_flipped_byte_is_found(memory):
    random = np.random.default_rng(1)
    for path in [path for path in memory.directory.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        for place in {0, len(good) - 1, *random.integers(0, len(good), 6).tolist()}:
            bad = bytearray(good)
            bad[place] ^= 1 << int(random.integers(8))
            path.write_bytes(bad)
            with pytest.raises(InputError, match=r"damaged|format"):
                Memory(memory.directory).verify()
        path.write_bytes(good)
        Memory(memory.directory).verify()


def test_a_missing_or_short_shard_is_told_in_a_line(memory):
    path = memory.shards.path("keys", 1)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match="too short"):
        memory.entries().keys(0, 40)
    path.unlink()
    with pytest.raises(InputError, match=r"is missing"):
        memory.verify()


def test_two_writers_at_once_are_refused(memory):
    with artifact.only_writer(memory.directory):
        for change in (lambda: memory.forget(["text-1"]), memory.compact, lambda: add(memory, {"new": [1]})):
            with pytest.raises(InputError, match="being written by another process"):
                change()
    assert any(entry[2] == "text-1" for entry in contents(memory).values())


class _Crash(BaseException):
    """The process is gone: nothing of ours may catch it."""


def _crash_at(monkeypatch, step: int) -> None:
    """Dies at the given one of all writes, renames, removals and commits, before or after it is done."""
    passed = iter(range(10_000))

    def dying(function):
        def call(*args, **kwargs):
            if next(passed) == step:
                raise _Crash
            result = function(*args, **kwargs)
            if next(passed) == step:
                raise _Crash
            return result

        return call

    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(shards, "write_atomically", dying(shards.write_atomically))
    monkeypatch.setattr(Catalogue, "seal", dying(Catalogue.seal))
    monkeypatch.setattr(Catalogue, "vacuum", dying(Catalogue.vacuum))
    monkeypatch.setattr(Memory, "clear_leftovers", dying(Memory.clear_leftovers))


def _files(memory: Memory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in memory.shards.folder.iterdir()}


def _until_it_survives(monkeypatch, prepare, change, check) -> int:
    """Runs `change` with a crash at every step in turn; `check` looks at what is left, then `change` is run again."""
    for step in range(10_000):
        memory = prepare(step)
        try:
            with monkeypatch.context() as patched:
                _crash_at(patched, step)
                change(memory)
        except _Crash:
            check(Memory(memory.directory), False)
            change(Memory(memory.directory))
            check(Memory(memory.directory), True)
            Memory(memory.directory).verify()
        else:
            return step
    raise AssertionError


@pytest.mark.slow
def test_a_crash_while_remembering_loses_nothing(tmp_path, texts, monkeypatch):
    whole = new_memory(tmp_path / "whole", ENCODER)
    add(whole, texts)

    def check(memory: Memory, finished: bool) -> None:
        assert contents(memory) in ([contents(whole)] if finished else [{}, contents(whole)])
        if finished:
            assert memory.digest == whole.digest
            assert _files(memory) == _files(whole)

    steps = _until_it_survives(
        monkeypatch, lambda step: new_memory(tmp_path / f"{step}", ENCODER), lambda memory: add(memory, texts), check
    )
    assert steps > 30


@pytest.mark.slow
def test_a_crash_while_forgetting_or_compacting_never_brings_anything_back(tmp_path, texts, monkeypatch):
    whole, smaller = tmp_path / "whole", tmp_path / "smaller"
    add(new_memory(whole, ENCODER), texts)
    shutil.copytree(whole, smaller)
    Memory(smaller).forget(["text-5"])

    def copied(folder: Path) -> Callable[[int], Memory]:
        return lambda step: Memory(shutil.copytree(folder, tmp_path / f"{folder.name}-{step}"))

    left = {id: entry for id, entry in expected(texts).items() if entry[2] != "text-5"}

    def forget(memory: Memory) -> None:
        if any(entry[2] == "text-5" for entry in contents(memory).values()):
            memory.forget(["text-5"])

    def check_forget(memory: Memory, finished: bool) -> None:
        assert contents(memory) in ([left] if finished else [left, expected(texts)])

    assert _until_it_survives(monkeypatch, copied(whole), forget, check_forget) > 2

    steps = _until_it_survives(
        monkeypatch, copied(smaller), lambda memory: memory.compact(), lambda memory, _: _same(contents(memory), left)
    )
    assert steps > 15


def _same(one, other) -> None:
    assert one == other


def test_unfinished_work_is_finished_or_dropped_not_mixed(tmp_path, texts, monkeypatch):
    memory = new_memory(tmp_path / "memory", ENCODER)
    with monkeypatch.context() as patched:
        _crash_at(patched, 25)
        with pytest.raises(_Crash):
            add(memory, texts)
    with pytest.raises(InputError, match=r"in the middle of remembering other text.*--restart"):
        add(memory, {"other": [1, 2]})
    add(memory, {"other": [1, 2]}, restart=True)
    assert {entry[2] for entry in contents(memory).values()} == {"other"}
    memory.verify()


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, texts):
    """A real one: a small file system in memory, where this machine lets us mount it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        memory = new_memory(disk / "memory", ENCODER)
        add(memory, texts)
        before = contents(memory)
        filler = disk / "filler"
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        filler.write_bytes(b"x" * (free - 8192))
        more = random_texts(np.random.default_rng(9), 300, "more")
        with pytest.raises(OSError, match="No space left"):
            add(memory, more)
        assert contents(Memory(memory.directory)) == before
        filler.unlink()
        add(memory, more)
        assert len(contents(memory)) == len(before) + sum(map(len, more.values()))
        memory.verify()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _forget_and_compact(directory, begun) -> None:
    begun.set()
    for name in [f"text-{number}" for number in range(12)]:
        memory = Memory(directory)
        if any(entry[2] == name for entry in contents(memory).values()):
            memory.forget([name])
        memory.compact()


@pytest.mark.slow
def test_killed_while_forgetting_and_compacting(memory, texts):
    """A real process, really killed, again and again."""
    random = np.random.default_rng(0)
    context = forks()
    wanted, seen = expected(texts), len(texts)
    for attempt in range(30):
        begun = context.Event()
        process = context.Process(target=_forget_and_compact, args=(memory.directory, begun))
        process.start()
        assert begun.wait(60)
        process.join(random.uniform(0, 0.3) if attempt < 8 else None)
        process.kill()
        process.join()
        names = {entry[2] for entry in contents(Memory(memory.directory)).values()}
        assert len(names) <= seen, "something came back"
        seen = len(names)
        assert contents(Memory(memory.directory)) == {id: e for id, e in wanted.items() if e[2] in names}
        if process.exitcode == 0:
            break
    assert names == {"text-12"}
    Memory(memory.directory).verify()


def _write(directory, texts) -> None:
    add(Memory(directory), texts)


@pytest.mark.slow
def test_reading_goes_on_while_another_process_writes(memory):
    before = contents(memory)
    writer = forks().Process(target=_write, args=(memory.directory, {"new": [1] * 500}))
    writer.start()
    while writer.is_alive():
        assert len(contents(memory)) in (len(before), len(before) + 500)
    writer.join()
    assert len(contents(memory)) == len(before) + 500


def test_a_memory_says_what_its_keys_are(memory):
    content = json.loads((memory.directory / "memory.json").read_text())
    assert content["identity"]["width"] == WIDTH
    assert content["identity"]["encoder"]["digest"] == "stub"


def test_what_an_earlier_version_mapped_is_let_go_at_once(tmp_path, texts):
    """Without waiting for Python's garbage collector: a server that adds documents would run out of open files."""
    memory = new_memory(tmp_path / "memory", ENCODER)
    add(memory, texts)
    earlier = weakref.ref(memory.entries())
    assert len(memory.entries().with_keys.take_tokens(np.arange(3))) == 3
    gc.disable()
    try:
        memory.forget(["text-5"])
        assert len(memory.entries())
        assert earlier() is None
    finally:
        gc.enable()


def test_nearest_of_proposed_entries(tmp_path):
    """Duplicates, forgotten entries, ids that never were and entries at the same distance are among those proposed."""
    memory = new_memory(tmp_path / "memory", ENCODER)
    add(memory, {"one": [1, 2, 3, 4], "gone": [5, 6], "two": [1, 2, 3, 4]})  # equal texts have equal keys
    memory.forget(["gone"])
    entries = memory.entries()
    alive = entries.ids(np.arange(len(entries)))
    random = np.random.default_rng(4)
    queries = random.standard_normal((20, WIDTH)).astype(np.float32)
    proposed = random.choice(np.concatenate([alive, np.arange(-2, 14)]), (20, 12))
    for count in (1, 3, 12, 15):
        ids, distances = entries.nearest(queries, proposed, count)
        for query, candidates, found, gaps in zip(queries, proposed, ids, distances):
            held = np.intersect1d(candidates, alive)
            right = ((entries.take(entries.rows(held)).astype(np.float32) - query) ** 2).sum(1)
            order = np.lexsort((held, right.round(4)))[:count]
            assert found.tolist() == [*held[order], *[MISSING] * (count - len(order))]
            assert np.allclose(gaps[: len(order)], right[order], rtol=1e-4)
            assert np.isinf(gaps[len(order) :]).all()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_files_of_a_memory_do_not_stay_open(tmp_path):
    """A server to which documents are added one by one has two files of each: more than a process may have open."""
    memory = new_memory(tmp_path / "memory", ENCODER)
    for number in range(40):
        add(memory, {f"text-{number}": [number] * 5})
    entries = memory.entries()
    before = open_files()
    rows = np.arange(len(entries))
    entries.nearest(np.zeros((1, WIDTH), np.float32), entries.ids(rows)[None], 3)
    assert entries.take_tokens(rows).tolist() == [number for number in range(40) for _ in range(5)]
    entries.prefetch(rows)
    assert open_files() < before + 10
