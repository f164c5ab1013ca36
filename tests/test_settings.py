import pytest

from spalm.errors import InputError
from spalm.runs.recipe import Recipe, read_recipe
from spalm.settings import Settings, added_since, describe_settings, differences, override


def test_assignments_are_laid_over():
    values = {"a": {"b": 1, "c": 2}}
    assert override(values, ["a.b=3", "d.e=[1, 2]"]) == {"a": {"b": 3, "c": 2}, "d": {"e": [1, 2]}}
    assert values == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize("wrong", ["steps", "=3", "a=[1"])
def test_assignments_that_are_none(wrong):
    with pytest.raises(InputError, match=r"for example|quote"):
        override({}, [wrong])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.step=3", r"unknown key 'training.step'; it takes batch_size, .*steps"),
        ("corpus.source.pfad=x", r"unknown key .*pfad'; it takes dev_share"),
        ("nets.width=3", "unknown key 'nets'; it takes adaptive, controls, corpus, evaluation"),
        ("training.steps=many", r"training.steps = 'many': .*integer"),
        ("training.seed=-1", r"training.seed = -1: .*greater than or equal to 0"),
        ("evaluation.memory_lengths=[-5]", r"evaluation.memory_lengths.0 = -5"),
        ("corpus.source={kind: text}", r"'corpus.source.path' is missing"),
        ("training.steps=0", r"training.steps = 0: .*greater than 0"),
        ("network.cutoffs=[9, 3]", r"must rise"),
        ("network.dropout=.nan", r"network.dropout = nan: .*finite"),
        ("corpus.source.kind=web", r"web"),
        ("training.steps.more=3", r"no keys inside 2500"),
        ("corpus=3", r"corpus = 3"),
    ],
)
def test_wrong_settings_get_one_line_that_names_them(assignment, message):
    with pytest.raises(InputError, match=message) as raised:
        read_recipe("demo", [assignment])
    assert "\n" not in str(raised.value)


def test_exponents_without_a_dot_are_numbers():
    assert read_recipe("demo", ["training.optimiser.learning_rate=1e-3"]).training.optimiser.learning_rate == 0.001


def test_no_such_recipe(tmp_path):
    with pytest.raises(InputError, match=r"take one of demo, enwik8"):
        read_recipe("dmeo", [])
    (tmp_path / "mine.yaml").write_text("a: [")
    with pytest.raises(InputError, match="is not YAML"):
        read_recipe(str(tmp_path / "mine.yaml"), [])


def test_differences_are_named_by_key():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2 -> 3", "d: None -> 4"]


def test_every_setting_is_described():
    rows = {key: (default, meaning) for key, default, meaning in describe_settings(Recipe)}
    assert rows["training.optimiser.warm_up"][0] == "0"
    assert rows["training.steps"] == ("required", "Number of optimiser steps.")
    assert rows["corpus.source[text].document_start"][0] == "None"
    assert [key for key, (_, meaning) in rows.items() if not meaning] == []


def test_a_new_setting_is_written_only_where_it_is_used():
    class Grown(Settings):
        """A setting of an earlier version, and one that it did not have."""

        old: int = 0
        """A number."""
        new: int = added_since(3, ge=0)
        """Another number."""

    assert Grown().as_json() == {"old": 0}
    assert Grown(new=4).as_json() == {"old": 0, "new": 4}
    assert Grown.parse({"old": 1}, "test") == Grown(old=1, new=3)
    with pytest.raises(InputError, match="new = -1"):
        Grown.parse({"new": -1}, "test")


def test_integers_fit_64_bits():
    class Numbers(Settings):
        """Two settings."""

        one: int = 0
        """A number."""
        many: list[int] = []
        """Numbers."""

    for wrong in ({"one": 2**63}, {"one": str(-(2**63) - 1)}, {"many": [1, 2**64]}):
        with pytest.raises(InputError, match="it does not fit 64 bits; give a smaller number"):
            Numbers.parse(wrong, "test")
    assert Numbers.parse({"one": 2**63 - 1}, "test").one == 2**63 - 1
