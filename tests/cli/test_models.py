"""The verbs that use a model with a memory, as a user types them."""

import json
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from spalm.attachment import Attached, AttachSettings, attach
from spalm.compute import Execution, Hardware
from spalm.neighbours.index.on_disk import OnDiskIndex
from spalm.semiparametric import search as searching
from support.commands import begun, refused, spalm
from support.tiny_models import END

FACT = "nu3 ka5 lo77 .\n"
PROMPT, ANSWER = f"{END}nu3 ka5", " lo77 ."
"""It begins as documents are read: to a tiny random model the same words elsewhere are something else."""
TRUSTING = {"combiner": "knn-lm", "knn": {"lambdas": [0.9], "counts": [4], "temperatures": [0.5]}}
"""A combiner that goes by the nearest: what a mixture learns on a random model is not to trust anything."""


@pytest.fixture
def folder(attached_folder, tmp_path):
    return shutil.copytree(attached_folder, tmp_path / "tiny")


def written(folder, prompt: str, *options: str) -> str:
    found = spalm("generate", folder, prompt, *options)
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


def learned_cited_and_forgotten(folder, note: Path, prompt: str, answer: str, most: str) -> None:
    asked = (folder, prompt, "--max-tokens", most)
    assert answer not in written(*asked)
    assert spalm("remember", folder, "--text", note).returncode == 0
    found = written(*asked, "--cite")
    assert answer in found
    assert f"{note.name}, token" in found
    assert answer not in written(*asked, "--no-memory")
    assert spalm("forget", folder, note.name).returncode == 0
    found = written(*asked, "--cite")
    assert answer not in found
    assert note.name not in found


@pytest.mark.slow
def test_a_fact_is_learned_from_a_document_cited_and_forgotten_with_it(folder, tmp_path):
    (tmp_path / "vault.txt").write_text(FACT)
    about = json.loads((folder / "attached.json").read_text())
    source = json.loads((folder / "corpus" / "manifest.json").read_text())["settings"]["source"]["path"]
    settings = AttachSettings.parse({**about["settings"], **TRUSTING}, "test")
    attach(about["model"], [*map(Path, source)], folder, settings=settings, execution=Execution(Hardware("cpu", 1)))
    learned_cited_and_forgotten(folder, tmp_path / "vault.txt", PROMPT, ANSWER, "4")


@pytest.mark.slow
def test_a_model_searches_through_an_index_on_disk(folder, tmp_path):
    """What is learned and forgotten later is so with this kind too."""
    (tmp_path / "vault.txt").write_text(FACT)
    made = spalm("index", folder, "--out", folder / "index", "--kind", "disk", "--count", "32")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["recall"] >= 0.95
    before = written(folder, "ka1 lo2", "--max-tokens", "5")
    assert spalm("remember", folder, "--text", tmp_path / "vault.txt").returncode == 0
    attached = Attached(folder, Hardware("cpu", 1))
    assert isinstance(attached.search.searcher.index, OnDiskIndex)
    new = attached.memory.entries().keys(len(attached.memory.entries()) - 1, len(attached.memory.entries()))
    assert attached.search.find(new)[1][0, 0] < 1e-6
    assert spalm("forget", folder, "vault.txt").returncode == 0
    assert written(folder, "ka1 lo2", "--max-tokens", "5") == before


def test_a_memory_that_does_not_fit_gets_its_index_on_disk(folder, monkeypatch):
    shutil.rmtree(folder / "index", ignore_errors=True)
    monkeypatch.setattr(searching, "_FEW", 100)
    monkeypatch.setattr(searching, "half_of_machine_ram", lambda: 1000)
    assert isinstance(Attached(folder, Hardware("cpu", 1)).search.searcher.index, OnDiskIndex)


@pytest.mark.slow
def test_writing_stops_where_it_is_told_and_follows_its_seed(folder):
    whole = spalm("generate", folder, "ka1 lo2", "--max-tokens", "12").stdout
    stop = whole.strip()[4:6]
    assert (
        spalm("generate", folder, "ka1 lo2", "--max-tokens", "12", "--stop", stop).stdout
        == whole[: whole.index(stop)] + "\n"
    )
    warm = ["generate", folder, "ka1 lo2", "--max-tokens", "12", "--temperature", "1", "--seed", "3"]
    assert spalm(*warm).stdout == spalm(*warm).stdout


@pytest.mark.slow
def test_static_and_dynamic_figures_stand_apart(folder, tmp_path):
    (tmp_path / "new.txt").write_text("ka1 lo2 mi3 nu4 .\n" * 20)
    found = json.loads(spalm("score", folder, tmp_path / "new.txt").stdout)
    assert {*found["static"]} == {"plain", "knn-lm", "adaptive"}
    assert {*found["dynamic"]} == {"cache", "growing"}


@pytest.mark.slow
def test_attach_prints_what_the_memory_did_and_refuses_what_it_cannot_do(folder, tmp_path):
    model = folder.parent / "model"
    about = json.loads((folder / "attached.json").read_text())
    shutil.copytree(about["model"], model)
    source = json.loads((folder / "corpus" / "manifest.json").read_text())["settings"]["source"]["path"]
    out = tmp_path / "own"
    small = ["--set", "context=64", "--set", "stride=48", "--set", "neighbours=16", "--set", "positions=512"]
    found = spalm("attach", model, *source, "--out", out, *small, "--search", "0.3")
    assert found.returncode == 0, found.stderr
    for word in ("plain", "knn-lm", "adaptive", "searched"):
        assert word in found.stdout
    assert "no model" in refused("attach", tmp_path / "none", *source, "--out", tmp_path / "x")
    assert "unknown key 'contxt'" in refused("attach", model, *source, "--out", out, "--set", "contxt=3")
    missing = f"there is no {tmp_path / 'none'}; give files or folders of text"
    assert missing in refused("attach", model, tmp_path / "none", "--out", tmp_path / "x")
    assert missing in refused("attach", model, *source, "--library", tmp_path / "none", "--out", tmp_path / "x")
    assert "there is no folder" in refused("generate", tmp_path / "nowhere", "hello")
    assert "no model with a memory" in refused("generate", tmp_path, "hello")
    assert "holds no model" in refused("serve", tmp_path)


@pytest.mark.slow
def test_the_server_answers_and_ends_when_it_is_told(folder):
    server = begun("serve", folder, "--port", 0)
    try:
        while "http://" not in server.errors():
            assert server.poll() is None, server.errors()
            time.sleep(0.05)
        address = server.errors().split(" is at ")[1].split()[0]
        with urllib.request.urlopen(f"{address}health", timeout=60) as answer:
            assert json.load(answer)["status"] == "ok"
        body = json.dumps({"prompt": "ka1 lo2", "max_tokens": 4, "temperature": 0}).encode()
        asked = urllib.request.Request(f"{address}v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
    assert text == spalm("generate", folder, "ka1 lo2", "--max-tokens", "4").stdout[:-1]
