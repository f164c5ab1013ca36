"""Rows of the table that are always there, those that are asked for, and what each of them is."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from spalm.errors import InputError
from spalm.lm import Reading, log_probabilities
from spalm.runs import ROWS, FinishedRun, Row, Run, print_results
from spalm.semiparametric import GateSettings, Retriever
from support.small_runs import small_recipe, small_run
from support.small_texts import sentences

TRAINED = ("transformer-xl-restarted", "spalm-literal", "spalm-extended")
"""The rows for which a network is trained when they are asked for."""
ALL = ("controls=true", "extended=true", "extended_gate.copy_width=5")
SEGMENT, MEMORY = 8, 8
GRID = (0.05, 0.1, 0.2, 0.3, 0.4)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(sentences(600, 0))
    return path


@pytest.fixture(scope="module")
def before(book, tmp_path_factory) -> tuple[FinishedRun, dict[Path, tuple[bytes, int]]]:
    """A run without controls, and its files: their bytes and when they were written."""
    folder = tmp_path_factory.mktemp("run") / "run"
    small_run(small_recipe(book), folder).everything(Console(quiet=True))
    return FinishedRun(folder), files_of(folder)


@pytest.fixture(scope="module")
def controlled(book, before) -> Run:
    """The same run, with controls and the extended row."""
    run = small_run(small_recipe(book, *ALL), before[0].directory)
    run.everything(Console(quiet=True))
    return run


@pytest.fixture(scope="module")
def finished(controlled) -> FinishedRun:
    return FinishedRun(controlled.directory)


def files_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_rows_come_when_they_are_asked_for_and_nothing_else_is_made_again(before, finished):
    run, files = before
    assert run.rows == [name for name in ROWS if name not in TRAINED]
    assert finished.rows == list(ROWS)
    after = files_of(finished.directory)
    assert {str(path.relative_to(run.directory)) for path in files if after[path] != files[path]} == {
        "SHA256SUMS",
        "recipe.yaml",
        "results.json",
    }
    new = {path.relative_to(run.directory).parts[:2] for path in after.keys() - files.keys()}
    assert {parts[1] if parts[0] == "evaluation" else parts[0] for parts in new} == {
        *TRAINED,
        *(f"{name}-{MEMORY}" for name in TRAINED),
    }


def test_recipes_say_which_rows_there_are(book):
    assert not small_recipe(book).as_json().keys() & {"controls", "extended", "extended_gate"}
    assert small_recipe(book, "controls=true").as_json()["controls"] is True
    assert small_recipe(book, "controls=true").rows == [name for name in ROWS if name != "spalm-extended"]
    assert small_recipe(book, "extended=true").networks == ["transformer", "transformer-xl", "spalm", "spalm-extended"]
    assert small_recipe(book, *ALL).rows == list(ROWS)
    scratch = small_recipe(book, *ALL, "spalm.start=0")
    assert scratch.rows == [name for name in ROWS if name != "transformer-xl-restarted"]
    assert scratch.networks == ["transformer", "transformer-xl", "spalm", "spalm-literal", "spalm-extended"]
    without = small_recipe(book, "spalm.gate.neighbours=0")
    assert "knn-lm-literal" not in without.rows
    with pytest.raises(InputError, match="as many neighbours as SPALM, which is 0 here"):
        without.knn_grid(ROWS["knn-lm-literal"])
    with pytest.raises(InputError, match=r"spalm.start = 0: .* so nothing restarts"):
        scratch.gated_model("transformer-xl-restarted")


def test_the_literal_spalm_is_the_papers_equations_from_scratch(finished):
    trained = finished.network("spalm-literal")
    own = finished.network("spalm")
    gate = GateSettings(neighbours=4, kind="scalar", bias=None, scaled=False)
    assert trained.model_settings.spalm.gate == gate
    assert trained.model_settings.first_step == 0
    assert trained.model_settings.training == own.model_settings.training
    assert trained.manifest["parents"].keys() == own.manifest["parents"].keys() - {"start"}
    with safe_open(trained.directory / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if name.startswith("gate.")}  # noqa: SIM118
    assert shapes == {"gate.gate.weight": [1, 16]}
    ids = finished.neighbours.array("test.ids")[:, :4]
    np.testing.assert_array_equal(finished.records("spalm-literal").of("test", "neighbours"), ids)
    assert finished.records("spalm-literal").of("test", "gate").shape[1] == 1


def test_the_extended_row_has_spalms_start_and_neighbours_and_a_gate_of_its_own(book, finished):
    trained, own = finished.network("spalm-extended"), finished.network("spalm")
    gate = trained.model_settings.spalm.gate
    assert gate == small_recipe(book, *ALL).gated_model("spalm-extended").spalm.gate
    assert (gate.neighbours, gate.copying, gate.copy_width) == (4, "own", 5)
    assert own.model_settings.spalm.gate == GateSettings(neighbours=4)
    assert trained.model_settings.first_step == own.model_settings.first_step == 12
    assert trained.manifest["parents"] == own.manifest["parents"]
    ids = finished.neighbours.array("test.ids")[:, :4]
    np.testing.assert_array_equal(finished.records("spalm-extended").of("test", "neighbours"), ids)


@torch.inference_mode()
def test_the_records_of_the_extended_row_are_what_its_network_computes(finished):
    records, text = finished.records("spalm-extended"), finished.corpus.split("test")
    spalm = finished.network("spalm-extended").load(torch.device("cpu"))
    near = finished.neighbours.array("train.distances")[:, 0]
    usual = near[np.linspace(0, len(near) - 1, min(len(near), 1 << 14)).astype(int)].mean()
    assert float(spalm.gate.usual_distance) == pytest.approx(usual, rel=1e-5)
    retriever, inputs, memory = Retriever(finished.neighbours, "test", 4), [text.start, *text.tokens.tolist()], None
    found, alone, shares = [], [], []
    for begin in range(0, len(text), SEGMENT):  # one lane, segment by segment, with the memory of training
        rows = np.arange(begin, min(begin + SEGMENT, len(text)))
        hidden, layer_inputs = spalm.base(torch.tensor([inputs[begin : begin + len(rows)]]), memory)
        memory = layer_inputs  # M is a segment
        output = spalm.gate(hidden[0], retriever(rows), spalm.base)
        log_probabilities = output.log_probabilities(spalm.base)
        torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(len(rows)))
        targets = torch.from_numpy(text.targets(rows))[:, None]
        found += log_probabilities.gather(-1, targets)[:, 0].tolist()
        alone += spalm.base.log_probabilities(hidden[0]).gather(-1, targets)[:, 0].tolist()
        shares += output.copied.share.tolist()
    np.testing.assert_allclose(records.log_probabilities("test"), found, atol=1e-4)
    np.testing.assert_allclose(records.of("test", "without_memory"), alone, atol=1e-4)
    np.testing.assert_allclose(records.of("test", "copied"), shares, atol=1e-3)
    ablated = finished.result("spalm-extended")["without_long_term_memory"]["test"]
    assert ablated == pytest.approx(np.exp(-np.mean(alone)), rel=1e-4)


def test_the_restarted_network_has_no_neighbours_and_the_start_of_spalm(finished):
    trained, own = finished.network("transformer-xl-restarted"), finished.network("spalm")
    assert trained.model_settings.spalm.gate.neighbours == 0
    assert trained.model_settings.first_step == own.model_settings.first_step == 12
    assert trained.manifest["parents"]["start"] == finished.network("transformer-xl").digest
    row = finished.result("transformer-xl-restarted")
    assert row["without_long_term_memory"] is None
    assert row["neighbours"] is None
    assert 0 <= row["p_against_transformer_xl"] <= 1
    reading = Reading.of(1, segment=SEGMENT, memory=MEMORY, lanes=1)
    split = finished.corpus.split("test")
    base = trained.load(torch.device("cpu")).base
    expected = log_probabilities(base, split, reading, positions=range(len(split)))
    np.testing.assert_allclose(finished.log_probabilities("transformer-xl-restarted", "test"), expected, atol=1e-5)
    assert not np.allclose(finished.log_probabilities("transformer-xl", "test"), expected, atol=1e-3)


@torch.inference_mode()
def test_every_token_has_its_left_context_in_overlapping_windows(finished):
    """Each position is read in a window of its own, which ends where the stride that it is in ends."""
    model = finished.network("transformer").load(torch.device("cpu"))
    text, stride = finished.corpus.split("test"), SEGMENT // 4
    inputs = [text.start, *text.tokens.tolist()]
    expected = []
    for position, target in enumerate(text.tokens.tolist()):
        end = (position // stride + 1) * stride
        begin = max(0, end - SEGMENT)
        assert position - begin >= min(position, 3 * SEGMENT // 4)
        window = torch.tensor([inputs[begin : position + 1]])
        hidden, _ = model(window)
        expected.append(float(model.log_probabilities(hidden[0, -1:])[0, target]))
    found = finished.log_probabilities("transformer-overlap", "test")
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not np.allclose(finished.log_probabilities("transformer", "test"), expected, atol=1e-3)
    assert finished.result("transformer-overlap")["memory_length"] == 0


@pytest.mark.parametrize(("given", "strides"), [(None, (None, 2)), (5, (5, 2)), (1, (1, 1))])
def test_a_stride_of_the_recipe_holds_where_it_is_shorter(book, given, strides):
    recipe = small_recipe(book, *([] if given is None else [f"evaluation.stride={given}"]))
    rows = ROWS["transformer"], ROWS["transformer-overlap"]
    assert tuple(recipe.evaluation_of(row).stride for row in rows) == strides


def test_the_literal_knn_lm_has_the_papers_grid_and_spalms_neighbours(finished):
    knn = finished.records("knn-lm-literal").facts["knn"]
    assert (knn["count"], knn["temperature"]) == (4, 1.0)

    def mixed(split: str, weight: float) -> np.ndarray:
        text = finished.corpus.split(split)
        found = Retriever(finished.neighbours, split, 4)(np.arange(len(text)))
        near = np.exp(-found.distances.numpy().astype(np.float64))
        hits = found.tokens.numpy() == text.tokens[:, None]
        base = np.exp(finished.log_probabilities("transformer-xl", split))
        return np.log((1 - weight) * base + weight * (near * hits).sum(1) / near.sum(1))

    assert knn["weight"] == max(GRID, key=lambda weight: mixed("dev", weight).mean())
    found = finished.log_probabilities("knn-lm-literal", "test")
    np.testing.assert_allclose(found, mixed("test", knn["weight"]), atol=1e-4)
    assert finished.result("knn-lm-literal")["without_long_term_memory"]["test"] == pytest.approx(
        finished.result("transformer-xl")["test"]
    )


def used(run: FinishedRun, row: Row) -> int | None:
    """The number of neighbours that a row uses, by what is on disk."""
    if row.mixture == "knn":
        return run.records(row.name).facts["knn"]["count"]
    if row.mixture == "adaptive":
        return 8 if "neighbours" in row.sources else None
    return 4 if row.gated else None


def test_the_table_says_how_many_neighbours_each_row_uses(finished):
    console = Console(width=60, record=True, file=StringIO())
    print_results(finished.results, finished.title, [], console=console)
    lines = console.export_text().splitlines()
    header = next(line for line in lines if line.split()[:1] == ["model"])
    last = header.index(" k ") + 1
    for name, row in ROWS.items():
        count = used(finished, row)
        assert finished.result(name)["neighbours"] == count
        line = next(line for line in lines if line.split()[:1] == [name])
        assert line[last].strip() == ("" if count is None else str(count))
        assert f"{finished.result(name)['test']:.2f}" in line
    parameters = finished.network("transformer").parameters
    assert any(f"also need the transformer ({parameters:,} parameters, 20 steps)" in line for line in lines)
