"""The command as a user types it: whole runs, kills, and bad input, each in a process of its own."""

import json
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from support.commands import PATIENCE, SMALL_RECIPE, begun, refused, script, spalm


@pytest.fixture
def recipe(text_folder, tmp_path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_RECIPE.replace("PATH", str(text_folder)))
    return path


@pytest.mark.slow
def test_a_whole_run_then_nothing_to_do_then_one_change(recipe, tmp_path):
    out = tmp_path / "run"
    first = spalm("run", recipe, "--out", out)
    assert first.returncode == 0, first.stderr
    rows = json.loads((out / "results.json").read_text())
    with_memory = ("transformer-xl", "knn-lm-literal", "knn-lm", "spalm", "spalm+knn", "spalm-adaptive")
    beyond = ("nearest", "exact", "adaptive")
    expected = [("transformer", 0), ("transformer-overlap", 0)]
    expected += [(name, length) for name in (*with_memory, *beyond) for length in (8, 32)]
    assert [(row["model"], row["memory_length"]) for row in rows] == expected
    for row in rows:
        assert row["unit"] == "perplexity/word"
        assert row["parameters"] > 0
        assert 1 < row["dev"] < 1000
        assert 1 < row["test"] < 1000
        assert f"{row['test']:.2f}" in first.stdout
    again = spalm("run", recipe, "--out", out)
    assert again.stdout == first.stdout
    assert again.stderr.count("finished before, unchanged") == 27
    assert again.stderr.count("remembered before, unchanged") == 1
    assert "train " not in again.stderr
    _look_at(out)
    # Only what depends on the change is made again.
    changed = spalm("run", recipe, "training.memory_length=16", "--out", out)
    assert changed.returncode == 0
    assert "train transformer-xl" in changed.stderr
    assert "train transformer:" not in changed.stderr
    assert "training.memory_length: 8 -> 16" in changed.stderr
    assert spalm("verify", out / "transformer").returncode == 0
    shown = spalm("show", out / "transformer")
    assert json.loads(shown.stdout)["kind"] == "language model"


def _look_at(run: Path) -> None:
    """What is made from a finished run, and one line for what cannot be."""
    found = spalm("study", run, "gates", "outputs", "--split", "dev")
    assert found.returncode == 0, found.stderr
    assert "long-term gains" in found.stdout
    written = {path.name for path in (run / "study" / "dev").iterdir()}
    assert written >= {"gates.svg", "gates.json", "outputs-counts.csv"}
    assert spalm("vary", run, "--count", 1).returncode == 0
    assert "at test" in spalm("study", run, "neighbours").stdout
    reported = spalm("report", run)
    assert reported.returncode == 0, reported.stderr
    assert (run / "report" / "report.html").resolve().as_uri() in reported.stderr
    assert "there is no analysis 'gate'" in refused("study", run, "gate")
    assert "no finished run" in refused("report", run / "corpus")
    assert "no finished run" in refused("explore", run.parent)


@pytest.mark.slow
def test_the_explorer_is_served_until_it_is_stopped(finished):
    server = begun("explore", finished.directory, "--port", 0)
    try:
        while "the explorer is at" not in server.errors():
            assert server.poll() is None, server.errors()
            time.sleep(0.05)
        address = server.errors().split("the explorer is at ")[1].split(" ")[0]
        with urllib.request.urlopen(f"{address}api/about") as answer:
            assert json.load(answer)["memory"]["entries"] == 18_000
        server.send_signal(signal.SIGINT)
        server.wait(20)
    finally:
        server.kill()


@pytest.mark.slow
def test_a_memory_grows_forgets_and_refuses(recipe, tmp_path):
    out, memory = tmp_path / "run", tmp_path / "run" / "memory"
    note = tmp_path / "note.txt"
    note.write_text("the cat sat on a mat .\n" * 5)
    found = spalm("remember", recipe, "--out", out, "--text", note)
    assert found.returncode == 0, found.stderr
    described = json.loads(found.stdout)
    assert described == json.loads(spalm("show", memory).stdout)
    assert described["version"] == 2
    names = [line.split("\t")[2] for line in spalm("show", memory, "--documents").stdout.splitlines()]
    assert names[-1] == "note.txt"
    assert described["documents"] == len(names)
    table = json.loads(spalm("neighbours", recipe, "--out", out, "--ram", "1G", "--recall", "0.9").stdout)
    assert table["entries"] == described["entries"]
    assert min(facts["recall"] for facts in table["splits"].values()) >= 0.9
    assert spalm("index", memory, "--out", out / "index").returncode == 0
    assert "did you mean 'note.txt'" in refused("forget", memory, "notes.txt")
    assert spalm("forget", memory, "note.txt").returncode == 0
    assert spalm("compact", memory).returncode == 0
    assert "note.txt" not in spalm("show", memory, "--documents").stdout
    assert [line.split("\t")[2].split()[0] for line in spalm("show", memory, "--versions").stdout.splitlines()] == [
        "made",
        "remembered",
        "remembered",
        "forgot",
        "compacted",
    ]
    assert spalm("verify", memory).returncode == 0
    said = refused("remember", recipe, "--out", out, "memory.stride=3")
    assert "keys of another kind (reading.stride: 4 -> 3)" in said
    assert "network.width" in refused("remember", recipe, "--out", out, "network.width=15")
    shard = next((memory / "shards").glob("*.keys"))
    content = bytearray(shard.read_bytes())
    content[77] ^= 4
    shard.write_bytes(content)
    assert shard.name in refused("verify", memory)
    assert "holds no memory" in refused("forget", tmp_path / "nowhere", "x")
    assert "--ram 3X: not a size" in refused("neighbours", recipe, "--out", out, "--ram", "3X")
    assert "neighbours.recall = 1.5" in refused("neighbours", recipe, "--out", out, "--recall", "1.5")


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_bytes(recipe, tmp_path):
    run = ("run", recipe, "training.steps=60", "evaluation.memory_lengths=[32]", "--out")
    assert spalm(*run, tmp_path / "whole").returncode == 0
    out, kills = tmp_path / "killed", 0
    for delay in (0.3, 0.6, 1.0, 1.5, 2.0, 3.0, PATIENCE):
        process = begun(*run, out)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        process.wait()
    assert process.returncode == 0
    assert kills
    assert (out / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()
    for stage in ("corpus", "transformer", "transformer-xl", "evaluation/transformer-xl-32"):
        manifests = [json.loads((root / stage / "manifest.json").read_text()) for root in (out, tmp_path / "whole")]
        assert manifests[0] == manifests[1]


@pytest.mark.slow
def test_stages_one_by_one(recipe, text_folder, tmp_path):
    out = tmp_path / "run"
    assert spalm("corpus", recipe, "--out", out).returncode == 0
    assert spalm("train", recipe, "transformer-xl", "--out", out, "--threads", "1", "--device", "cpu").returncode == 0
    found = spalm("evaluate", recipe, "transformer-xl", "--out", out)
    assert "transformer-xl" in found.stdout
    assert not (out / "transformer").exists()
    # What is refused changes nothing that is finished.
    before = sorted(out.rglob("*"))
    other = ["train", recipe, "transformer-xl", "--out", out, "training.steps=21"]
    assert "--device nope: torch cannot use it here" in refused(*other, "--device", "nope")
    assert "out of memory" in refused(*other, "network.feed_forward=1000000000000")
    (text_folder / "story-1.txt").write_bytes(b"\xff")
    assert "not UTF-8" in refused("corpus", recipe, "--out", out)
    assert sorted(out.rglob("*")) == before


def test_bad_recipes_and_settings(recipe, tmp_path):
    out = tmp_path / "run"
    assert "unknown key 'training.step'" in refused("run", recipe, "training.step=3", "--out", out)
    assert "training.steps = 'soon'" in refused("run", recipe, "training.steps=soon", "--out", out)
    assert "there is no recipe 'nothing'" in refused("run", "nothing", "--out", out)
    assert "need 20,000" in refused("run", recipe, "training.segment_length=5000", "--out", out)
    assert not (out / "transformer" / "manifest.json").exists()


def test_bad_text(recipe, text_folder, tmp_path):
    out = tmp_path / "run"
    (text_folder / "story-0.txt").write_bytes(b"\xff\xfe" * 100)
    assert "story-0.txt is not UTF-8 (byte 0xff)" in refused("run", recipe, "--out", out)
    (text_folder / "story-0.txt").write_bytes(b"")
    assert "story-0.txt is empty" in refused("run", recipe, "--out", out)
    assert "there is no" in refused("run", recipe, "corpus.source.path=elsewhere", "--out", out)
    assert not (out / "corpus" / "manifest.json").exists()


def test_text_that_looks_like_markup(tmp_path):
    assert "there is no recipe '[/x]'" in refused("run", "[/x]", "--out", tmp_path)


@pytest.mark.slow
def test_interrupted_from_the_keyboard(recipe, tmp_path):
    process = begun("train", recipe, "transformer", "training.steps=100000", "--out", tmp_path / "run")
    while not (tmp_path / "run" / "transformer" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.errors().endswith("spalm: stopped; run the same command again to go on from here\n")


def test_wrong_words_on_the_command_line(recipe):
    found = spalm("train", recipe, "transformer-xxl", "--out", "x")
    assert found.returncode == 2
    assert "transformer-xxl" in found.stderr
    assert spalm("--help").returncode == 0
    assert spalm("--version").stdout.startswith("spalm ")


def test_settings_are_listed_as_they_are_given():
    listed = spalm("settings", "attach").stdout
    assert "context = 1024" in listed
    assert "attach." not in listed
    assert "training.steps = " in spalm("settings", "training").stdout
    assert "there are no settings 'nonsense'; give one of title, corpus, " in refused("settings", "nonsense")


def test_a_truncated_token_array(recipe, tmp_path):
    out = tmp_path / "run"
    assert spalm("corpus", recipe, "--out", out).returncode == 0
    path = out / "corpus" / "train.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    assert "train.tokens has" in refused("train", recipe, "transformer", "--out", out)


@pytest.mark.slow
def test_a_checkpoint_of_another_configuration(recipe, tmp_path):
    out = tmp_path / "run"
    process = begun("train", recipe, "transformer", "training.steps=100000", "--out", out)
    while not (out / "transformer" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    said = refused("train", recipe, "transformer", "training.steps=100000", "network.width=32", "--out", out)
    assert "network.width: 16 -> 32" in said
    assert "--restart" in said


@pytest.mark.slow
def test_no_disk_space(recipe, tmp_path):
    """A limit on the size of files stands for a full disk: the same error path, and it needs no privileges."""
    out = tmp_path / "run"
    assert spalm("corpus", recipe, "--out", out).returncode == 0
    (tmp_path / "limited.py").write_text(
        "import resource; from spalm.cli import main; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); main()"
    )
    found = script(tmp_path / "limited.py", "train", recipe, "transformer", "--out", out).ended()
    assert found.returncode == 1, found.stderr
    assert "no space left" in found.stderr
    assert "Traceback" not in found.stderr
    assert not (out / "transformer" / "manifest.json").exists()
    assert spalm("train", recipe, "transformer", "--out", out).returncode == 0
