"""Runs, memories and attached models that an earlier version made open as they did, and give the same numbers."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from spalm import load
from spalm.memory import Memory
from spalm.neighbours import open_searcher
from spalm.runs import FinishedRun, print_results
from support.commands import spalm

HERE = Path(__file__).parent
FOLDER = "@FOLDER@"
"""Stands in the archive for the folder in which it is unpacked."""
TOKENS = torch.tensor([[3, 7, 11, 5, 2, 13, 8, 1, 4, 6]])


@pytest.fixture(scope="module", params=["made-by-0.1.0"])
def archive(request) -> Path:
    return HERE / f"{request.param}.tar.xz"


@pytest.fixture(scope="module")
def answers(archive) -> dict:
    """What the earlier version found."""
    return json.loads((HERE / archive.name.replace(".tar.xz", ".json")).read_text())


@pytest.fixture(scope="module")
def made(archive, tmp_path_factory) -> Path:
    """The archive, unpacked. Whoever changes it unpacks it for himself."""
    return unpacked(archive, tmp_path_factory.mktemp("made"))


def unpacked(archive: Path, to: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extractall(to, filter="data")
    for path in (to / "attached" / "attached.json", to / "attached" / "corpus" / "manifest.json"):
        path.write_text(path.read_text().replace(FOLDER, str(to)))
    return to


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def log_probabilities(folder: Path) -> list[float]:
    pytest.importorskip("transformers")
    scores = load(folder).to_transformers()(TOKENS).logits.double().log_softmax(-1)
    return scores[0, :-1].gather(-1, TOKENS[0, 1:, None])[:, 0].tolist()


def test_a_memory_finds_what_it_found(made, answers):
    memory = Memory(made / "run" / "memory")
    queries = memory.entries().keys(0, 5).astype(np.float32) + np.float32(0.03)
    ids, distances = open_searcher(memory, made / "run" / "index")[0].search(queries, 4)
    np.testing.assert_allclose(distances, answers["search"]["distances"], rtol=1e-5)
    apart = np.diff(distances, axis=1, prepend=-1.0, append=np.inf) > 1e-6
    unique = apart[:, :-1] & apart[:, 1:]  # what is equally near may come in any order
    assert (ids[unique] == np.array(answers["search"]["ids"])[unique]).all()
    assert unique.sum() > 10


@pytest.mark.parametrize("name", ["run", "attached"])
def test_a_model_gives_each_token_the_same_probability(made, answers, name):
    assert log_probabilities(made / name) == pytest.approx(answers[name], abs=1e-6)


def test_a_finished_run_is_read(made):
    run = FinishedRun(made / "run")
    assert run.rows == ["transformer", "transformer-xl", "knn-lm", "spalm", "spalm+knn", "spalm-adaptive"]
    for row in run.rows:
        assert np.isfinite(run.log_probabilities(row, "test")).all()
    assert [run.result(row)["neighbours"] is None for row in run.rows] == [True, True, False, True, False, True]
    print_results(run.results, run.title, [], console=Console(quiet=True))
    perplexity = np.exp(-run.log_probabilities("spalm", "test").mean())
    assert perplexity == pytest.approx(run.result("spalm")["test"], rel=1e-6)


@pytest.mark.slow
def test_commands_read_what_was_made(archive, tmp_path):
    folder = unpacked(archive, tmp_path)
    for part in ("run/memory", "run/spalm", "run/neighbours", "attached/memory"):
        for verb in ("show", "verify"):
            found = spalm(verb, part, cwd=folder)
            assert found.returncode == 0, found.stderr
    found = spalm("study", "run", "gates", cwd=folder)
    assert found.returncode == 0, found.stderr
    assert list((folder / "run" / "study" / "test").glob("gates*"))


def test_a_run_that_was_finished_is_finished(archive, made, tmp_path):
    """The same command finds every stage done and changes nothing but the table; it adds the rows that are new."""
    folder = unpacked(archive, tmp_path)
    before = contents(folder / "run")
    found = spalm("run", "recipe.yaml", "--out", "run", "--threads", "1", cwd=folder)
    assert found.returncode == 0, found.stderr
    after = contents(folder / "run")
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {"results.json", "recipe.yaml", "config.json"}
    new = {name.split("/")[1].rsplit("-", 1)[0] for name in after.keys() - before.keys() if name.startswith("eval")}
    rows = {"transformer-overlap", "knn-lm-literal", "nearest", "exact", "adaptive"}
    assert new == {"inputs-transformer-xl", *rows}
    assert {*FinishedRun(folder / "run").rows} - {*FinishedRun(made / "run").rows} == rows
