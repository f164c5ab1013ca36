"""A run on one text file: cut by position, neighbours from its own document, refusals before anything is trained."""

import numpy as np
import pytest
import yaml
from rich.console import Console

from spalm.compute import Execution, Hardware
from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.neighbours import NeighbourSettings
from spalm.runs import FinishedRun
from spalm.runs.checks import resolve_exclusion
from spalm.study.analyses.by_neighbours import vary_neighbours
from support.small_runs import small_recipe, small_run
from support.small_texts import sentences


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(sentences(600, 0))
    return path


@pytest.mark.slow
def test_from_the_text_to_the_table(book, tmp_path, capsys):
    made = small_run(small_recipe(book), tmp_path / "run")
    made.everything(Console(quiet=True))
    said = [line for line in capsys.readouterr().err.splitlines() if "neighbours.document=false" in line]
    assert len(said) == 1
    finished = FinishedRun(tmp_path / "run")
    assert finished.corpus.split("test").names == ["book.txt (test)"]
    assert [row["model"] for row in finished.results] == made.recipe.rows

    train, window = finished.corpus.split("train"), finished.neighbours.settings["window"]
    assert window == len(train) // 100 > 1
    ids = finished.neighbours.array("train.ids").astype(np.int64)
    assert (ids >= 0).all()
    gaps = np.abs(ids - np.arange(len(train))[:, None])
    assert gaps.min() > window

    asked = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["neighbours"]
    assert (asked["document"], asked["window"]) == (True, 0)
    assert finished.neighbour_settings == made.neighbour_settings

    vary_neighbours(finished, (8,), Execution(Hardware("cpu", 1)), retrain=True)
    wider = finished.directory / "by-neighbours" / "neighbours"
    assert f'"window": {window}' in (wider / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.segment_length=5000", r"need 20,000; give more text"),
        ("neighbours.window=100000", r"neighbours.window = 100,000.*smaller window"),
    ],
)
def test_what_cannot_be_finished_is_refused_before_anything_is_trained(book, tmp_path, assignment, message):
    made = small_run(small_recipe(book, assignment), tmp_path / "run")
    with pytest.raises(InputError, match=message):
        made.everything(Console(quiet=True))
    with pytest.raises(InputError, match=message):
        made.network("transformer")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["corpus"]


def test_a_split_of_one_token_is_refused_before_anything_is_trained(tmp_path):
    for name, text in (("train", sentences(100, 0)), ("valid", "the\n"), ("test", "cat")):
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(InputError, match=r"the test split has 1 token\(s\).*corpus.source.test_share"):
        small_run(small_recipe(tmp_path), tmp_path / "run").everything(Console(quiet=True))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["corpus"]


@pytest.mark.parametrize("assignment", ["evaluation.stride=9", "memory.stride=9"])
def test_a_stride_longer_than_a_segment_is_refused_with_the_recipe(book, assignment):
    with pytest.raises(InputError, match=r"stride = 9: windows have 8 tokens"):
        small_recipe(book, assignment)


@pytest.mark.parametrize(
    ("sizes", "wanted", "expected"),
    [
        ([600, 400], {"document": True}, (False, 10)),
        ([500, 500], {"document": True}, (True, 0)),
        ([1000], {"document": True, "window": 7}, (False, 7)),
        ([1000], {"window": 3}, (False, 3)),
        ([1000], {}, (False, 0)),
        ([10], {"document": True}, (False, 1)),
        ([1_000_000], {"document": True}, (False, 1024)),
    ],
)
def test_own_documents_are_excluded_unless_one_holds_most_of_the_text(sizes, wanted, expected):
    train = TokenStream(np.zeros(sum(sizes), np.int8), np.cumsum(sizes), lambda: [], start=0)
    settings = NeighbourSettings(**wanted)
    resolved = resolve_exclusion(settings, train)
    assert (resolved.document, resolved.window) == expected
    assert (resolved is settings) == (resolved == settings)
