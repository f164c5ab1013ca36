"""Entries without keys: exact matches find them, searches for nearest contexts do not, and all promises hold."""

import numpy as np
import pytest

from spalm.compute import Execution
from spalm.errors import InputError
from spalm.memory import MISSING, Memory, remember, shards, source_of_text
from spalm.memory.exact import reversed_context
from spalm.neighbours import IndexSettings, make_searcher
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

ENCODER = StubEncoder()


@pytest.fixture
def texts() -> dict[str, dict[str, list[int]]]:
    """Documents with keys and without, added in turn."""
    random = np.random.default_rng(3)
    return {name: random_texts(random, 7, name) for name in ("keyed", "plain", "keyed-later", "plain-later")}


@pytest.fixture
def memory(tmp_path, texts, monkeypatch) -> Memory:
    monkeypatch.setattr(shards, "SHARD_BYTES", 40 * 2 * ENCODER.width)
    made = new_memory(tmp_path / "memory", ENCODER)
    for name, part in texts.items():
        add(made, part, keys=name.startswith("keyed"))
    return made


def add(memory: Memory, texts: dict[str, list[int]], *, keys: bool) -> None:
    text = stream(texts)
    remember(memory, ENCODER if keys else None, text, source=source_of_text(text), execution=Execution(restart=True))


def tokens_by_document(memory: Memory) -> dict[str, list[int]]:
    entries = memory.entries()
    live = entries.live_documents
    ids = [np.arange(first, first + count) for first, count in zip(live.first_ids, live.entries)]
    return {name: entries.tokens_of(each).tolist() for name, each in zip(live.names, ids)}


def test_all_documents_are_there_and_some_have_keys(memory, texts):
    assert tokens_by_document(memory) == {name: text for part in texts.values() for name, text in part.items()}
    keyed = memory.entries().with_keys
    assert 0 < len(keyed) < len(memory.entries())
    names = {keyed.source(int(id)).document for id in keyed.ids(np.arange(len(keyed)))}
    assert names == {*texts["keyed"], *texts["keyed-later"]}
    expected = [ENCODER.of(stream(texts[name]).tokens) for name in ("keyed", "keyed-later")]
    np.testing.assert_array_equal(keyed.keys(0, len(keyed)), np.concatenate(expected))
    assert memory.entries().with_keys is memory.entries().with_keys
    assert keyed.with_keys is keyed


def test_exact_matches_find_both_kinds_and_nearest_contexts_only_those_with_keys(memory, texts):
    for part in texts.values():
        name, text = max(part.items(), key=lambda item: len(item[1]))
        found = memory.exact.current().find(reversed_context(text[:-1]))
        assert found.lengths[0, 0] == len(text) - 1
        assert memory.entries().source(int(found.ids[0, 0, 0])).document == name
    searcher, _ = make_searcher(
        memory, memory.directory.parent / "index", IndexSettings(kind="exact", recall=1.0, neighbours=3)
    )
    ids, _ = searcher.search(np.random.default_rng(1).standard_normal((50, ENCODER.width)).astype(np.float32), 20)
    keyed = memory.entries().with_keys
    assert (keyed.rows(ids[ids != MISSING]) >= 0).all()
    searcher.catch_up()


def test_forgetting_compacting_and_verifying(memory, texts):
    for part in texts.values():
        memory.forget([next(iter(part))])
    left = {name: text for part in texts.values() for name, text in list(part.items())[1:]}
    expected = memory.entries().with_keys
    keys = expected.keys(0, len(expected))
    memory.compact()
    assert tokens_by_document(memory) == left
    keyed = memory.entries().with_keys
    np.testing.assert_array_equal(keyed.keys(0, len(keyed)), keys)
    forgotten = next(iter(texts["plain"].values()))
    if len(forgotten) > 3:
        assert memory.exact.current().find(reversed_context(forgotten)).lengths[0, 0] < len(forgotten)
    memory.verify()
    numbers = {path.stem for path in (memory.directory / "shards").glob("*.tokens")}
    with_keys = {path.stem for path in (memory.directory / "shards").glob("*.keys")}
    assert with_keys < numbers
    path = memory.directory / "shards" / f"{min(numbers - with_keys)}.tokens"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(InputError, match="is damaged"):
        memory.verify()


def test_a_killed_addition_without_keys_goes_on_to_the_same_bytes(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 80)
    text = stream(texts["plain"])

    class Stop(Exception):
        pass

    def files(memory: Memory) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (memory.directory / "shards").iterdir()}

    whole, stopped = (new_memory(tmp_path / name, ENCODER) for name in ("whole", "stopped"))
    remember(whole, None, text, source=source_of_text(text))
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Stop

    with pytest.raises(Stop):
        remember(stopped, None, text, source=source_of_text(text), check=check)
    assert not len(stopped.entries())
    remember(stopped, None, text, source=source_of_text(text))
    assert files(stopped) == files(whole)
    assert len(files(whole)) > 3


def test_a_memory_without_any_keys_has_no_index(tmp_path, texts):
    memory = new_memory(tmp_path / "memory", ENCODER)
    add(memory, texts["plain"], keys=False)
    with pytest.raises(InputError, match="holds no keys"):
        make_searcher(memory, tmp_path / "index", IndexSettings(kind="faiss", recall=0.9, neighbours=3))
