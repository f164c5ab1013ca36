"""Levels of strength: whole runs on the corpus of another, resumed, verified, rid of forgotten documents, compared."""

import csv
import json
import math
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from spalm.api import carry_out
from spalm.compute import Execution, Hardware
from spalm.errors import InputError
from spalm.maintenance import forget_with_receipt, remove_forgotten, verify_directory
from spalm.memory import Memory
from spalm.runs import HELD_OUT, KEY_NETWORK, FinishedRun, Recipe, Run
from spalm.study import ANALYSES, AnalysisRequest, available_analyses, run_analyses, vary_steps
from spalm.study.analyses.by_strength import _order, _spalm_reaches_knn, existing_levels
from support.commands import refused, spalm
from support.small_texts import sentences

pytestmark = pytest.mark.slow
EXECUTION = Execution(Hardware("cpu", 1))
QUIET = Console(quiet=True)
OWN, SHORT, LONG = 20, 5, 30
"""Numbers of steps of the run, and of its levels."""


@pytest.fixture(scope="module")
def whole(shared) -> FinishedRun:
    """A tiny run of documents with a word of their own, and two levels."""

    def fill(folder: Path) -> None:
        texts = folder / "texts"
        texts.mkdir()
        for number in range(12):
            lines = sentences(24, number).replace("mat", f"secret{number}x")
            (texts / f"doc-{number}.txt").write_text(lines)
        recipe = {
            "title": "strength",
            "corpus": {
                "source": {"kind": "text", "path": str(texts), "dev_share": 0.2, "test_share": 0.2},
                "tokeniser": {"kind": "words"},
            },
            "network": {"layers": 1, "width": 16, "heads": 2, "head_width": 8, "feed_forward": 16},
            "training": {
                "steps": OWN,
                "batch_size": 4,
                "segment_length": 8,
                "memory_length": 8,
                "optimiser": {"learning_rate": 0.01, "warm_up": 4},
                "evaluate_every": 10,
                "seed": 1,
            },
            "neighbours": {"held_out": 8},
            "adaptive": {"passes": 1, "width": 8},
            "evaluation": {"unit": "perplexity/word"},
        }
        carry_out(Run(Recipe.parse(recipe, "test"), folder / "run", EXECUTION), QUIET)
        vary_steps(FinishedRun(folder / "run"), [LONG, OWN, SHORT], EXECUTION, console=QUIET)

    return FinishedRun(shared.once("strength", fill) / "run")


@pytest.fixture
def copy(whole, tmp_path) -> FinishedRun:
    return FinishedRun(shutil.copytree(whole.directory, tmp_path / "run"))


@pytest.fixture
def alone(copy) -> FinishedRun:
    """The run without levels."""
    shutil.rmtree(copy.directory / "by-steps")
    return copy


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_level_is_a_whole_run_on_the_corpus_of_the_run(whole):
    levels = existing_levels(whole)
    assert [*levels] == [SHORT, OWN, LONG]
    assert levels[OWN] is whole
    assert {path.name for path in (whole.directory / "by-steps").iterdir()} == {str(SHORT), str(LONG)}
    for steps, evaluate_every, warm_up in ((SHORT, 5, 0), (LONG, 10, 4)):
        level = levels[steps]
        training = whole.recipe.training
        optimiser = training.optimiser.model_copy(update={"warm_up": warm_up})
        training = training.model_copy(
            update={"steps": steps, "evaluate_every": evaluate_every, "optimiser": optimiser}
        )
        assert level.recipe == whole.recipe.model_copy(update={"training": training})
        assert level.rows == whole.rows
        assert {row["steps"] for row in level.results} == {steps}
        assert level.network(KEY_NETWORK).manifest["parents"]["corpus"] == whole.corpus.digest
        assert not (level.directory / "corpus").exists()
        assert not any(path.is_symlink() for path in level.directory.rglob("*"))


def test_what_is_finished_stays_and_what_was_killed_goes_on(whole, alone, monkeypatch, capsys):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("spalm.runs.run.find_neighbours", killed)
        with pytest.raises(KeyboardInterrupt):
            vary_steps(alone, [SHORT], EXECUTION, console=QUIET)
    assert "strength" not in available_analyses(alone)
    level = alone.directory / "by-steps" / str(SHORT)
    trained = (level / "transformer" / "SHA256SUMS").stat().st_mtime_ns
    assert not (level / "results.json").exists()
    vary_steps(alone, [SHORT], EXECUTION, console=QUIET)
    assert (level / "transformer" / "SHA256SUMS").stat().st_mtime_ns == trained
    expected = whole.directory / "by-steps" / str(SHORT)
    assert (level / "results.json").read_bytes() == (expected / "results.json").read_bytes()
    before = contents(alone.directory)
    capsys.readouterr()
    vary_steps(alone, [SHORT, OWN], EXECUTION, console=QUIET)
    assert contents(alone.directory) == before
    said = capsys.readouterr().err
    assert "tokenise" not in said
    assert "finished before, unchanged" in said
    assert f"{OWN} steps: that is {alone.directory} itself" in said


@pytest.mark.parametrize("split", HELD_OUT)
def test_gains_are_those_computed_by_hand(whole, split):
    expected = []
    for steps, folder in ((SHORT, "by-steps/5"), (OWN, "."), (LONG, "by-steps/30")):
        rows = json.loads((whole.directory / folder / "results.json").read_text())
        base = next(row[split] for row in rows if row["model"] == "transformer-xl")
        for row in rows:
            if row["model"] != "transformer-xl":
                nats = math.log(base) - math.log(row[split])
                expected.append([steps, base, row["model"], row[split], 100 * (base - row[split]) / base, nats])
    found = ANALYSES["strength"](AnalysisRequest(whole, split))
    table = found.tables["levels"]
    assert table.columns == ["steps", "transformer-xl", "model", "perplexity/word", "% gained", "nats/word gained"]
    assert [row[:4] for row in table.rows] == [row[:4] for row in expected]
    np.testing.assert_allclose([row[4:] for row in table.rows], [row[4:] for row in expected])  # pyright: ignore
    figures = {(row[0], row[2]): row[3] for row in expected}
    at = [steps for steps in (SHORT, OWN, LONG) if figures[steps, "spalm"] <= figures[steps, "knn-lm"]]
    assert found.data["spalm_at_or_below_knn_lm"]["spalm"]["at"] == at
    axes = found.picture().axes[0]
    assert axes.get_xscale() == "log"
    assert axes.xaxis_inverted()
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}
    with_memory = ("knn-lm-literal", "knn-lm", "spalm", "spalm+knn", "spalm-adaptive", "nearest", "exact", "adaptive")
    assert {name for name in lines if not name.startswith("_")} == {*with_memory}
    for name in with_memory:
        points = sorted([row[1], row[4]] for row in expected if row[2] == name)
        np.testing.assert_allclose(lines[name], points)


def test_characters_gain_in_nats_too(copy):
    for path in copy.directory.rglob("results.json"):
        rows = [{**row, "unit": "bits/character", "test": row["test"] / 10} for row in json.loads(path.read_text())]
        path.write_text(json.dumps(rows))
        (path.parent / "SHA256SUMS").unlink()
    found = ANALYSES["strength"](AnalysisRequest(FinishedRun(copy.directory))).tables["levels"]
    assert found.columns[3:] == ["bits/character", "% gained", "nats/character gained"]
    for _, base, _, figure, percent, nats in found.rows:
        assert percent == pytest.approx(100 - 100 * figure / base)
        assert nats == pytest.approx((base - figure) / math.log2(math.e))


def test_the_papers_order_is_said_of_each_kind_of_spalm():
    def results(**figures: float) -> list:
        return [{"model": name.replace("_", "-"), "test": figure} for name, figure in figures.items()]

    reached = _spalm_reaches_knn(
        {
            5: results(knn_lm=50, spalm=60, knn_lm_literal=55, spalm_literal=60, spalm_adaptive=1),
            2000: results(knn_lm=40, spalm=40, knn_lm_literal=45, spalm_literal=50, spalm_extended=44),
            8000: results(knn_lm=30, spalm=29),
        },
        "test",
    )
    assert reached == {
        "spalm": {"at": [2000, 8000], "not_at": [5]},
        "spalm-literal": {"at": [], "not_at": [5, 2000]},
        "spalm-extended": {"at": [2000], "not_at": []},
    }
    assert _order(reached) == (
        "The paper's order: spalm is at or below knn-lm at 2,000 and 8,000 steps, not at 5; "
        "spalm-literal is at or below knn-lm-literal at no level; "
        "spalm-extended is at or below knn-lm-literal at every level."
    )
    assert _order({"spalm": {"at": [1, 2, 3], "not_at": []}}).endswith("spalm is at or below knn-lm at every level.")


def test_the_analysis_needs_a_second_level(whole, alone, tmp_path):
    assert "strength" in available_analyses(whole)
    assert "strength" not in available_analyses(alone)
    with pytest.raises(InputError, match=r"has no further levels of strength; make some with `spalm vary .* --steps"):
        run_analyses(AnalysisRequest(alone), ["strength"], tmp_path, console=QUIET)
    console = Console(record=True, width=200, quiet=False)
    with console.capture() as captured:
        run_analyses(AnalysisRequest(whole), ["strength"], tmp_path / "out", console=console)
    shown = captured.get()
    assert "more in strength.csv" not in shown
    assert "for levels of 5, 20 and 30 steps" in shown
    assert "The paper's order: spalm is at or below knn-lm" in " ".join(shown.split())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(f"strength.{end}" for end in ("json", "csv", "png", "svg")),
        "SHA256SUMS",
    }
    columns, *rows = csv.reader((tmp_path / "out" / "strength.csv").open(newline=""))
    assert (columns[0], len(rows)) == ("steps", 3 * (len(whole.rows) - 1))


def test_other_settings_of_a_level_are_named(alone):
    vary_steps(alone, [3], EXECUTION, assignments=["training.seed=2", "network.dropout=0.3"], console=QUIET)
    caption = ANALYSES["strength"](AnalysisRequest(alone)).caption
    assert "The level of 3 steps has other settings (network.dropout: 0.0 -> 0.3; training.seed: 1 -> 2)." in caption
    for assignment, message in (
        ("training.steps=7", "training.steps: the numbers of steps are given as --steps"),
        ("corpus.tokeniser.kind=bytes", "all levels have the corpus and the unit"),
        ("evaluation.unit=bits/character", "all levels have the corpus and the unit"),
        ("training.batch_size=0", "training.batch_size = 0"),
    ):
        with pytest.raises(InputError, match=message):
            vary_steps(alone, [4], EXECUTION, assignments=[assignment], console=QUIET)
    assert {path.name for path in (alone.directory / "by-steps").iterdir()} == {"3"}


def test_levels_elsewhere_are_neither_read_nor_made(alone, whole, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (alone.directory / "by-steps").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="leads out of"):
        vary_steps(alone, [SHORT], EXECUTION, console=QUIET)
    assert not any((tmp_path / "elsewhere").iterdir())
    (alone.directory / "by-steps").unlink()
    (alone.directory / "by-steps").symlink_to(whole.directory / "by-steps")
    assert [*existing_levels(alone)] == [OWN]


def test_verify_finds_a_flipped_byte_in_a_level(copy):
    assert not verify_directory(copy.directory).unchecked
    level = copy.directory / "by-steps" / str(SHORT)
    shard = next((level / "memory" / "shards").glob("*.keys"))
    names = ("results.json", "recipe.yaml", "spalm/model.safetensors", "neighbours/dev.ids")
    for path in (*(level / name for name in names), shard):
        good = path.read_bytes()
        path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
        assert any(path.name in line for line in verify_directory(copy.directory).damaged), path
        path.write_bytes(good)
    assert not verify_directory(copy.directory).damaged


def traces(run: FinishedRun, number: int) -> dict[bytes, str]:
    """What would show that a training document is still there: name, word, tokens, and keys at each level."""
    text = run.corpus.split("train")
    rows = np.arange(int(text.begins[number]), int(text.ends[number]))
    name = text.names[number]
    found = {name.encode(): "name", name.replace("doc-", "secret").replace(".txt", "x").encode(): "word"}
    for start in range(0, len(rows) - 16, 7):
        piece = text.tokens[rows[start : start + 16]].astype("i8")
        for dtype in ("<i4", "<u2", "u1"):
            found |= {(piece + more).astype(dtype).tobytes(): "tokens" for more in (0, 1)}
    for level in existing_levels(run).values():
        found |= {key.tobytes(): "key" for key in Memory(level.directory / "memory").entries().take(rows[20::9])}
    return found


def searched(folder: Path, wanted: dict[bytes, str]) -> set[str]:
    files = contents(folder)
    return {f"{what} in {path}" for path, held in files.items() for piece, what in wanted.items() if piece in held}


@pytest.mark.parametrize("way", ["compact", "receipt"])
def test_a_forgotten_document_is_gone_from_all_levels(copy, way):
    number, folder = 3, copy.directory
    name, wanted = copy.corpus.split("train").names[number], traces(copy, number)
    text = copy.corpus.split("train")
    rows = np.arange(int(text.begins[number]), int(text.ends[number]))
    before = searched(folder, wanted)
    for steps in (SHORT, LONG):
        inside = {each.split(" in ")[0] for each in before if f"by-steps/{steps}/memory" in each}
        assert inside >= {"name", "tokens", "key"}
    figures = [level.results for level in existing_levels(copy).values()]
    if way == "receipt":
        receipt = forget_with_receipt(folder, [name])
        assert receipt.content["found"] == []
        removed = {each["path"] for each in receipt.content["removed"]}
        assert {"corpus", "by-steps/5/memory", "by-steps/5/neighbours", "by-steps/30/evaluation/spalm-8"} <= removed
    else:
        copy.memory.forget([name])
        remove_forgotten(folder)
    assert not searched(folder, wanted)
    assert not verify_directory(folder).damaged
    assert not verify_directory(folder).unchecked
    again = FinishedRun(folder)
    assert [level.results for level in existing_levels(again).values()] == figures
    for level in existing_levels(again).values():
        assert name not in Memory(level.directory / "memory").entries().live_documents.names
        ids = np.fromfile(level.directory / "neighbours" / "dev.ids", "<i4")
        assert not np.isin(ids, rows).any()
    assert ANALYSES["strength"](AnalysisRequest(again)).tables["levels"].rows
    assert remove_forgotten(folder)[0] == []
    with pytest.raises(InputError, match=r"has forgotten 1 training document\(s\), so further levels cannot"):
        vary_steps(again, [7], EXECUTION, console=QUIET)
    assert not (folder / "by-steps" / "7").exists()


def test_an_unfinished_memory_of_a_level_goes_too(alone, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    name, wanted = alone.corpus.split("train").names[3], traces(alone, 3)
    with monkeypatch.context() as patched:
        patched.setattr(import_module("spalm.memory.remember"), "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            vary_steps(alone, [2], EXECUTION, console=QUIET)
    inside = "by-steps/2/memory/shards"
    assert any(f"tokens in {inside}" in each for each in searched(alone.directory, wanted))
    receipt = forget_with_receipt(alone.directory, [name])
    assert "by-steps/2/memory" in {each["path"] for each in receipt.content["removed"]}
    assert receipt.content["found"] == []
    assert not searched(alone.directory, wanted)
    assert not verify_directory(alone.directory).damaged


def test_a_run_with_more_texts_in_its_memory_is_refused(alone):
    path = alone.directory / "results.json"
    rows = [{**row, "more_texts_in_memory": 2} for row in json.loads(path.read_text())]
    path.write_text(json.dumps(rows))
    (alone.directory / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match=r"its memory holds 2 more text\(s\)"):
        vary_steps(FinishedRun(alone.directory), [SHORT], EXECUTION, console=QUIET)


def test_the_commands(copy):
    found = spalm("vary", copy.directory, "--steps", f"{LONG}, {SHORT}", "--threads", 1)
    assert found.returncode == 0, found.stderr
    assert "train " not in found.stderr
    written = "".join(found.stdout.split())
    assert written.index(f"by-steps/{SHORT}/results.json") < written.index(f"by-steps/{LONG}/results.json")
    found = spalm("study", copy.directory, "strength")
    assert found.returncode == 0, found.stderr
    assert (copy.directory / "study" / "test" / "strength.svg").exists()
    assert "give one of them" in refused("vary", copy.directory, "--steps", 5, "--count", 1)
    assert "give numbers from 1" in refused("vary", copy.directory, "--steps", "5,0")
    assert "belongs to --steps" in refused("vary", copy.directory, "training.seed=2")
