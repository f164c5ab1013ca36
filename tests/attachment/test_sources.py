"""A memory with exact matches alone, with keys for some documents, with a library; and what is chosen by itself."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spalm.api import attach_and_export
from spalm.attachment import Attached, AttachSettings, attach, keyed_text, score_files
from spalm.attachment.keyed_text import CHOICE_FILE, KeyedText, choose_memory, likeness
from spalm.compute import Execution, Hardware
from spalm.corpus import TokenStream, tokenise_files
from spalm.errors import DamagedError, InputError
from spalm.files import read_json
from spalm.generation import AttachedModels, model_of
from spalm.lm.pretrained import Backend
from spalm.memory.exact import reversed_context
from spalm.server import make_server
from support.servers import client_of

ON_CPU = Execution(Hardware("cpu", 1))
SMALL = AttachSettings(context=64, stride=48, neighbours=32, positions=2000, held_out=500)


@pytest.fixture(scope="module")
def base(attached_folder) -> Attached:
    return Attached(attached_folder, Hardware("cpu", 1))


@pytest.fixture(scope="module")
def texts(base) -> list[Path]:
    return [Path(path) for path in read_json(base.directory / "corpus" / "manifest.json")["settings"]["source"]["path"]]


@pytest.fixture(scope="module")
def exact_folder(base, texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "attached"
    settings = SMALL.model_copy(update={"memory": "exact"})
    return attach_and_export(str(base.base.folder.path), texts, folder, settings=settings, execution=ON_CPU).directory


@pytest.fixture
def exact(exact_folder, tmp_path) -> Attached:
    return Attached(shutil.copytree(exact_folder, tmp_path / "copy"), Hardware("cpu", 1))


def stream(*documents: list[int]) -> TokenStream:
    lengths = [len(document) for document in documents]
    return TokenStream(np.concatenate(documents), np.cumsum(lengths), lambda: [*map(str, range(len(lengths)))], start=0)


def test_exact_matches_alone_pay_and_need_no_keys(exact):
    figures = exact.combiner_artifact.facts["figures"]["test"]
    assert figures["adaptive"] < 0.8 * figures["plain"]
    assert set(figures) == {"plain", "adaptive", "tokens"}
    assert len(exact.memory.entries().with_keys) == 0 < len(exact.memory.entries())
    assert not (exact.directory / "index").exists()
    assert list(exact.combiners) == ["plain", "adaptive"]
    assert exact.mixture.neighbours == 0 < exact.mixture.levels


def test_without_keys_it_generates_cites_scores_explains_and_takes_documents(exact, tmp_path):
    model = model_of(AttachedModels(exact))
    quotation = "zebra77 quokka81 walrus12 gecko5 otter9 lynx3 ."
    assert model.memory.add("zoo.txt", f"{quotation}\n" * 3) > 0
    prompt = "zebra77 quokka81 walrus12 gecko5"
    answer = model.generate(prompt, max_tokens=6)
    assert any(source.document == "zoo.txt" for citation in answer.citations for source in citation.sources)
    assert model.score(quotation).perplexity < model.score(quotation).perplexity_without_memory
    explained = model.explain(quotation, 8)
    assert not explained.neighbours
    assert explained.matches[0].places[0].document == "zoo.txt"
    assert model.memory.forget("zoo.txt") == 1
    tokens = model.tokeniser.prompt(prompt)[1:]
    held = model.store.entries()
    found = model.store.exact.current().find(reversed_context(tokens))
    assert "zoo.txt" not in {held.source(int(id)).document for id in found.ids[found.ids >= 0]}
    (tmp_path / "new.txt").write_text("ka1 lo2 mi3 .\n" * 4)
    scores = score_files(exact, [tmp_path / "new.txt"])
    assert set(scores["static"]) == {"plain", "adaptive"}
    assert "dynamic" not in scores


def test_without_keys_it_is_served(exact):
    with client_of(make_server(model_of(AttachedModels(exact)))) as client:
        request = {"prompt": "ka1 lo2 mi3", "max_tokens": 4, "temperature": 0}
        answer = client.post("/v1/completions", json=request)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"]
        assert client.get("/metrics").status_code == 200
        assert client.post("/memory/documents", json={"name": "a.txt", "text": "ka1 lo2 mi3 ."}).status_code < 300
        assert client.delete("/memory/documents/a.txt").status_code < 300


def test_transformers_interface_is_what_generation_gives(exact):
    pytest.importorskip("transformers")
    import torch

    model = model_of(AttachedModels(exact))
    wrapped = model.to_transformers()
    prompt = model.tokeniser.prompt("ka1 lo2 mi3 nu4 ka5")
    expected = [token.id for token in model.generate("ka1 lo2 mi3 nu4 ka5", max_tokens=9).tokens]
    found = wrapped.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, len(prompt) :].tolist()
    assert found == expected
    # A program's own loop: the tokens before are those that were read into the same cache.
    read = wrapped(torch.tensor([prompt[:-1]]))
    step = wrapped(torch.tensor([prompt[-1:]]), past_key_values=read.past_key_values)
    whole = wrapped(torch.tensor([prompt]))
    torch.testing.assert_close(step.logits[0, -1], whole.logits[0, -1], rtol=1e-4, atol=1e-4)
    read.past_key_values.crop(-2)
    with pytest.raises(ValueError, match="give `text_ids`"):
        wrapped(torch.tensor([prompt[-1:]]), past_key_values=read.past_key_values)


@pytest.mark.slow
def test_keys_for_some_documents_and_a_library(base, texts, tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    (library / "one.txt").write_text("quokka81 walrus12 gecko5 .\n" * 5)
    settings = SMALL.model_copy(update={"memory": "both", "keys": 2000, "library": [str(library)]})
    folder = str(base.base.folder.path)
    made = attach(folder, texts, tmp_path / "out", settings=settings, execution=ON_CPU)
    entries, train = made.memory.entries(), made.corpus.split("train")
    assert 1000 < len(entries.with_keys) <= 2000
    assert len(entries) > len(train)
    held_out = [name for split in ("dev", "test") for name in made.corpus.split(split).names]
    assert {*train.names, *held_out, "one.txt"} == {*entries.live_documents.names}
    figures = made.combiner_artifact.facts["figures"]["test"]
    assert set(figures) == {"plain", "knn-lm", "adaptive, nearest only", "adaptive, exact only", "adaptive", "tokens"}
    assert figures["adaptive"] < figures["plain"]
    before = (made.combiner_artifact.directory / "manifest.json").read_bytes()
    again = attach(folder, texts, tmp_path / "out", settings=settings, execution=ON_CPU)
    assert (again.combiner_artifact.directory / "manifest.json").read_bytes() == before
    for change in ({"library": []}, {"keys": 1000}, {"memory": "exact", "keys": None}):
        other = settings.model_copy(update=change)
        with pytest.raises(InputError, match=r"was begun with another memory .* give another --out"):
            attach(folder, texts, tmp_path / "out", settings=other, execution=ON_CPU)


def test_the_last_documents_or_those_most_alike_get_keys(base, tmp_path):
    train, corpus = base.corpus.split("train"), base.corpus
    lengths = train.ends - train.begins
    settings = SMALL.model_copy(update={"memory": "both", "keys": int(lengths[-3:].sum())})
    chosen = KeyedText.choose(train, settings, corpus)
    assert chosen.with_keys.names == train.names[-3:]
    assert chosen.without_keys.names == train.names[:-3]
    assert len(chosen.with_keys) + len(chosen.without_keys) == len(train)
    first = train.tokens[: int(train.ends[0])].tolist()
    (tmp_path / "like.txt").write_text(corpus.tokeniser.decode(first))
    alike = settings.model_copy(update={"keys": int(lengths[0]), "like": str(tmp_path / "like.txt")})
    assert train.names[0] in KeyedText.choose(train, alike, corpus).with_keys.names
    with pytest.raises(InputError, match="keys = 1: no training document is so short"):
        KeyedText.choose(train, settings.model_copy(update={"keys": 1}), corpus)


def test_keys_that_are_left_over_go_to_the_library(base, texts, tmp_path):
    folder, corpus = str(base.base.folder.path), base.corpus
    (tmp_path / "library").mkdir()
    names = [f"{name}.txt" for name in ("alike", "other")]
    alike = corpus.tokeniser.decode(corpus.split("train").tokens[:200].tolist())
    for name, text in zip(names, (alike, "0123456789 " * 40)):
        (tmp_path / "library" / name).write_text(text)
    library = tokenise_files([tmp_path / "library"], corpus.tokeniser)
    keys = len(corpus.split("train")) + int(library.ends[0])
    sizes = {"keys": keys, "positions": 200, "held_out": 100}
    settings = SMALL.model_copy(update={"memory": "both", "library": [str(tmp_path / "library")], **sizes})
    made = attach(folder, texts, tmp_path / "out", settings=settings, execution=ON_CPU)
    entries = made.memory.entries()
    documents = {name: entries.live_documents.names.index(name) for name in names}
    with_keys = set(entries.live_documents.index_of(entries.with_keys.ids(np.arange(len(entries.with_keys)))))
    assert documents["alike.txt"] in with_keys
    assert documents["other.txt"] not in with_keys
    model = model_of(AttachedModels(made))
    (span, *_) = model.trace("0123456789 " * 20)
    assert span.sources[0].document == "other.txt", "the whole library has exact matches"


def test_likeness_is_a_difference_of_cross_entropies():
    documents = stream([1, 2, 3, 4], [1, 5, 5, 6], [1, 7, 8, 9])
    scores = likeness(documents, stream([5, 6, 1, 1]))
    assert scores.argmax() == 1
    common, frequent, rare = (math.log((1 + ratio) / 2) for ratio in (2.0, 1.5, 3.0))  # p_sample / p_all
    assert scores[1] == pytest.approx((common + 2 * frequent + rare) / 4)
    assert scores[2] == pytest.approx((common + 3 * math.log(1 / 2)) / 4)


@pytest.mark.parametrize(("speed", "keys"), [(1e6, None), (4.0, 1200)])
def test_the_number_of_keys_follows_the_speed_and_is_kept(base, tmp_path, monkeypatch, capsys, speed, keys):
    measured = []

    def measure(*_) -> float:
        measured.append(speed)
        return speed

    monkeypatch.setattr(keyed_text, "_tokens_per_second", measure)
    for _ in range(2):
        chosen, _ = choose_memory(SMALL, base.base, base.corpus, directory=tmp_path, execution=ON_CPU)
        assert (chosen.memory, chosen.keys) == ("both", keys)
    assert len(measured) == 1, "a killed run continues with what was chosen"
    assert capsys.readouterr().err.count("the model, by torch in float32, reads") == 2, "each says what is left"
    assert read_json(tmp_path / CHOICE_FILE)["keys"] == keys


def test_the_speed_is_measured(base):
    assert keyed_text._tokens_per_second(base.base, base.corpus.split("train")) > 0


def test_keys_are_made_by_what_reads_fastest_and_so_are_those_that_come_later(base, tmp_path, monkeypatch, capsys):
    speeds = {Backend("torch", "float32"): 2.0, Backend("torch", "bfloat16"): 5.0, Backend("llama"): 3.0}
    monkeypatch.setattr(keyed_text, "usable_backends", lambda *_: list(speeds))
    monkeypatch.setattr(keyed_text, "_tokens_per_second", lambda base, _: speeds[base.keys_by])
    for _ in range(2):
        _, chosen = choose_memory(SMALL, base.base, base.corpus, directory=tmp_path, execution=ON_CPU)
        assert chosen.keys_by == Backend("torch", "bfloat16")
    assert "keys by torch in bfloat16: 5 tokens/s" in capsys.readouterr().err
    assert read_json(tmp_path / CHOICE_FILE)["keys_by"] == {"name": "torch", "precision": "bfloat16"}
    other = replace(base.base, hardware=replace(base.base.hardware, precision="float32"))
    with pytest.raises(InputError, match="begun with keys by torch in bfloat16"):
        choose_memory(SMALL, other, base.corpus, directory=tmp_path, execution=ON_CPU)


@pytest.mark.parametrize("wrong", [{"keys_by": 3}, {"keys_by": {"name": "onnx"}}, {"tokens_per_second": "0"}])
def test_a_choice_that_was_damaged_is_one_line(base, tmp_path, wrong):
    choose_memory(SMALL, base.base, base.corpus, directory=tmp_path, execution=ON_CPU)
    path = tmp_path / CHOICE_FILE
    path.write_text(json.dumps({**read_json(path, dict), **wrong}))
    with pytest.raises(DamagedError, match=r"memory-choice\.json is damaged"):
        choose_memory(SMALL, base.base, base.corpus, directory=tmp_path, execution=ON_CPU)


def test_where_reading_takes_seconds_only_nothing_else_is_tried(base, tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(keyed_text, "usable_backends", lambda *_: [Backend("torch", "float32"), Backend("llama")])
    monkeypatch.setattr(keyed_text, "_tokens_per_second", lambda base, _: tried.append(base.keys_by) or 1e6)
    _, chosen = choose_memory(SMALL, base.base, base.corpus, directory=tmp_path, execution=ON_CPU)
    assert tried == [chosen.keys_by] == [Backend("torch", "float32")]


def test_a_folder_says_what_made_its_keys_and_those_of_earlier_versions_open(base, tmp_path):
    copy = shutil.copytree(base.directory, tmp_path / "copy")
    content = read_json(copy / "attached.json")
    assert content.pop("keys_by") == {"name": "torch", "precision": "float32"}
    (copy / "attached.json").write_text(json.dumps(content))
    (copy / "SHA256SUMS").unlink()
    assert Attached(copy, Hardware("cpu", 1)).base.keys_by == Backend()


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="memory = exact makes no keys"):
        AttachSettings.parse({"memory": "exact", "keys": 5}, "settings")
