"""Forgotten is gone: nothing that a document left stays in any file of a directory, and the receipt says so."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from spalm.api import attach_and_export, load
from spalm.attachment import AttachSettings
from spalm.compute import Execution, Hardware
from spalm.corpus import Corpus, CorpusSettings, build_corpus
from spalm.errors import InputError
from spalm.generation.inspection import CorpusPassage
from spalm.maintenance import forget_with_receipt, remove_forgotten, verify_directory
from spalm.memory import Memory
from spalm.neighbours import IndexSettings, make_searcher
from spalm.runs import FinishedRun
from support.commands import spalm
from support.tiny_models import write_model

EXECUTION = Execution(Hardware("cpu", 1))
RARE = "zyzzyva quixotry"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A model with a memory of some documents, each with a word of its own."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("forget")
    (folder / "texts").mkdir()
    random = np.random.default_rng(1)
    for number in range(14):
        words = [f"word{index}" for index in random.integers(0, 40, 60)]
        words[7::9] = [f"secret{number} {RARE}{number}"] * len(words[7::9])
        (folder / "texts" / f"doc-{number}.txt").write_text(" ".join(words) + "\n")
    text = "".join(path.read_text() for path in (folder / "texts").iterdir())
    model = write_model(folder / "model", "llama", text)
    settings = AttachSettings(context=64, stride=48, neighbours=8, positions=400, dev_share=0.2, test_share=0.2)
    attach_and_export(str(model), [folder / "texts"], folder / "attached", settings=settings, execution=EXECUTION)
    make_searcher(Memory(folder / "attached" / "memory"), folder / "attached" / "index", IndexSettings(kind="faiss"))
    return folder / "attached"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "attached")


def traces(folder: Path, name: str) -> dict[bytes, str]:
    """What would show that a document is still there: its name, its text, its tokens and its keys."""
    entries = Memory(folder / "memory").entries()
    number = entries.live_documents.names.index(name)
    first, count = int(entries.live_documents.first_ids[number]), int(entries.live_documents.entries[number])
    rows = entries.rows(np.arange(first, first + count))
    secret = f"secret{name.removesuffix('.txt').rsplit('-', 1)[1]} {RARE}"
    found = {name.encode(): "name", secret.encode(): "text"}
    tokens = entries.take_tokens(rows)
    for start in range(0, count - 24, 5):
        for dtype in ("<i4", "<u2"):
            for more in (0, 1):
                found[(tokens[start : start + 24] + more).astype(dtype).tobytes()] = "tokens"
    if len(entries.with_keys):
        found |= {key.tobytes(): "key" for key in entries.take(rows)[9::7]}
    return found


def searched(folder: Path, wanted: dict[bytes, str]) -> set[str]:
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        f"{what} in {path.relative_to(folder)}"
        for path, content in contents.items()
        for piece, what in wanted.items()
        if piece in content
    }


def document_of(folder: Path, split: str) -> str:
    return Corpus(folder / "corpus").split(split).names[0]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_nothing_of_a_forgotten_document_stays_in_any_file(copy, split):
    name = document_of(copy, split)
    wanted = traces(copy, name)
    assert {"tokens", "key", "name"} <= {each.split()[0] for each in searched(copy, wanted)}
    receipt = forget_with_receipt(copy, [name])
    assert not searched(copy, wanted)
    assert receipt.content["found"] == []
    assert {"corpus", "memory", "index"} <= {each["path"] for each in receipt.content["removed"]}
    assert not verify_directory(copy).damaged
    assert not verify_directory(copy).unchecked
    model = load(copy, execution=EXECUTION)
    assert model.generate("word1", max_tokens=2)
    assert name not in model.memory.documents()
    assert remove_forgotten(copy)[0] == []


def test_the_receipt_finds_what_is_left(copy):
    name = document_of(copy, "dev")
    text = "".join(chr(letter) for letter in b"the same again")
    (copy / "notes.txt").write_text(f"{text} {name}")
    receipt = forget_with_receipt(copy, [name])
    assert receipt.content["found"] == [{"path": "notes.txt", "what": "its name"}]
    assert any("still in notes.txt" in line for line in receipt.lines())
    assert json.loads(receipt.path.read_text())["sha256"] == receipt.content["sha256"]


@pytest.mark.parametrize("split", ["dev", "test"])
def test_the_explorer_does_not_show_a_forgotten_document(copy, split):
    model = load(copy, execution=EXECUTION)
    explorer, name = model.explorer, document_of(copy, split)
    assert explorer.documents(split, name)[0]["name"] == name
    explorer.passage(CorpusPassage(split, 0, 0, 20))
    model.memory.forget(name)
    for _ in range(2):
        assert not explorer.documents(split, name)
        for show in (explorer.passage, explorer.trace):
            with pytest.raises(InputError, match="was forgotten"):
                show(CorpusPassage(split, 0, 0, 20))
        with pytest.raises(InputError, match="was forgotten"):
            explorer.token(CorpusPassage(split, 0, 0, 20), 3)
        remove_forgotten(copy)
        explorer = load(copy, execution=EXECUTION).explorer
        assert all("doc-" in each["name"] for each in explorer.documents(split, ""))


@pytest.mark.parametrize("step", ["maintenance.artifact_rows._erase_unused_words", "artifact.finish_erasure"])
def test_what_was_interrupted_is_finished(copy, monkeypatch, step):
    def killed(*_):
        raise KeyboardInterrupt

    name = document_of(copy, "dev")
    wanted = traces(copy, name)
    Memory(copy / "memory").forget([name])
    with monkeypatch.context() as patched:
        patched.setattr(f"spalm.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_forgotten(copy)
    with pytest.raises(InputError, match="was interrupted; run `spalm compact` again"):
        Corpus(copy / "corpus")
    remove_forgotten(copy)
    assert not searched(copy, wanted)
    assert not verify_directory(copy).damaged


@pytest.mark.parametrize("given", ["", "memory"])
def test_a_memory_that_is_a_link_is_the_runs_own(copy, tmp_path, given):
    (tmp_path / "disk").mkdir()
    (copy / "memory").rename(tmp_path / "disk" / "entries")
    (copy / "memory").symlink_to(tmp_path / "disk" / "entries")
    name = document_of(copy, "train")
    wanted = traces(copy, name)
    assert searched(tmp_path, wanted)
    receipt = forget_with_receipt(copy / given, [name])
    assert not searched(tmp_path, wanted)
    assert receipt.content["found"] == []
    assert "corpus" in {each["path"] for each in receipt.content["removed"]}
    assert receipt.content["searched"]["files"] > len([path for path in copy.rglob("*") if path.is_file()]) - 1


def begin(folder: Path, kind: str, files: dict[str, bytes]) -> None:
    """Leaves a stage as it is when it is killed."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    identity = {"kind": kind, "version": 1, "settings": {}, "parents": {}}
    (folder / "unfinished.json").write_text(json.dumps(identity))


def test_unfinished_work_goes_and_training_stays(copy):
    name = document_of(copy, "train")
    wanted = traces(copy, name)
    left = b"".join(wanted)
    begin(copy / "neighbours", "neighbours", {"work/train.queries": left, "train.ids": left})
    begin(copy / "evaluation" / "spalm-8", "records", {"dev.log_probabilities": left})
    begin(copy / "corpus.previous", "corpus", {"train.tokens": left, "journal.json": b"{}"})
    begin(copy / "spalm", "semiparametric language model", {"checkpoints/1/model.safetensors": b"parameters"})
    works = [copy / "index" / f"work-{'0' * 16}", copy / "other" / f"work-{'1' * 16}"]
    for work in works:
        work.mkdir(parents=True)
        (work / "keys").write_bytes(left)
    (copy / "other" / "lists").write_bytes(left)
    (copy / "combiner" / "work").write_bytes(left)
    (copy / "combiner" / "scratch.json").write_text('["work"]')
    remove_forgotten(copy)  # nothing is forgotten, so nothing goes
    assert all(work.exists() for work in works)
    assert (copy / "neighbours" / "work" / "train.queries").exists()
    receipt = forget_with_receipt(copy, [name])
    assert not searched(copy, wanted)
    paths = {each["path"] for each in receipt.content["removed"]}
    assert {"neighbours", "evaluation/spalm-8", "corpus.previous", "index", "other", "combiner"} <= paths
    assert [each["path"] for each in receipt.content["kept"]] == ["spalm"]
    assert any("kept in spalm: training that is not finished" in line for line in receipt.lines())
    assert (copy / "spalm" / "checkpoints" / "1" / "model.safetensors").read_bytes() == b"parameters"
    assert not any((copy / "neighbours").iterdir())
    assert not verify_directory(copy).damaged


def test_a_corpus_with_other_tokens_that_was_set_aside_loses_the_document_too(copy, whole):
    source = {"kind": "text", "path": str(whole.parent / "texts")}
    settings = CorpusSettings.parse({"source": source, "tokeniser": {"kind": "bytes"}}, "test")
    before = build_corpus(settings, copy / "corpus.previous")
    name = document_of(copy, "train")
    held = {each for split in ("train", "dev", "test") for each in before.split(split).names}
    wanted = {name.encode(): "name", (whole.parent / "texts" / name).read_bytes()[20:60]: "text"}
    assert searched(copy / "corpus.previous", wanted) >= {"text in train.tokens"}
    receipt = forget_with_receipt(copy, [name])
    assert not searched(copy, wanted)
    assert receipt.content["found"] == []
    assert {"corpus", "corpus.previous"} <= {each["path"] for each in receipt.content["removed"]}
    after = Corpus(copy / "corpus.previous")
    left = {each for split in ("train", "dev", "test") for each in after.split(split).names}
    assert held - left == {name}
    assert after.tokeniser.decode(after.split("train").tokens.tolist()).count("secret") > 20


def test_every_search_is_asked_again(copy, monkeypatch):
    receipt = forget_with_receipt(copy, [document_of(copy, "train")])
    assert {way: each["found"] for way, each in receipt.content["requeried"].items()} == dict.fromkeys(
        ("documents", "trace", "nearest"), 0
    )
    assert all(each["asked"] for each in receipt.content["requeried"].values())
    monkeypatch.setattr(Memory, "forget", lambda *_: 0)
    name = document_of(copy, "test")
    receipt = forget_with_receipt(copy, [name])
    for way, each in receipt.content["requeried"].items():
        assert each["found"], way
        assert f"still found by {way}: {each['found']} of {each['asked']}" in receipt.lines()
    assert "nothing of it is left" not in receipt.lines()[-1]


def test_a_namesake_with_another_text_stays(copy):
    """Whoever adds and deletes a document through the server does not erase one of dev that has the same name."""
    memory, name = Memory(copy / "memory"), document_of(copy, "dev")
    model = load(copy, execution=EXECUTION)
    model.memory.forget(name)
    model.memory.add(document_of(copy, "test") + "x", "word1 word2 word3")
    model.memory.forget(document_of(copy, "test") + "x")
    remove_forgotten(copy)
    assert document_of(copy, "test") in memory.entries().live_documents.names
    assert document_of(copy, "test").startswith("doc-")


def test_a_run_keeps_its_figures_and_loses_the_document(finished, tmp_path):
    folder = shutil.copytree(finished.directory, tmp_path / "run")
    run = FinishedRun(folder)
    name, before = run.corpus.split("train").names[3], run.corpus.digest
    text = run.corpus.split("train")
    rows = np.arange(int(text.begins[3]), int(text.ends[3]))
    tokens = text.tokens[rows[:24]].tobytes()
    keys = run.memory.entries().take(rows[::40])
    wanted = {name.encode(): "name", tokens: "tokens", **{key.tobytes(): "key" for key in keys}}
    found = spalm("forget", folder, name, "--receipt")
    assert found.returncode == 0, found.stderr
    assert "nothing of it is left" in found.stderr
    assert not searched(folder, wanted)
    again = FinishedRun(folder)
    assert again.corpus.digest == before
    assert again.results == run.results
    assert (again.neighbours.array("train.ids")[rows] == -1).all()
    for row in ("spalm", "spalm-literal", "spalm-extended"):
        assert np.isin(finished.records(row).of("test", "neighbours"), rows).any()
        assert not np.isin(again.records(row).of("test", "neighbours"), rows).any()
        again.log_probabilities(row, "test")
    assert not verify_directory(folder).damaged
