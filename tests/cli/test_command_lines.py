"""Bad command lines, in this process: each ends with an exit code and one line, without a traceback."""

import re
from pathlib import Path

import pytest

from spalm.cli import entry
from spalm.runs import Recipe
from spalm.settings import describe_settings
from support.command_lines import CASES, ENDLESS, HUGE, arguments_of, make_places


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("command-lines"))


@pytest.mark.parametrize("line", CASES, ids=lambda line: line.replace(ENDLESS, "9..."))
def test_a_bad_command_line_gets_one_line(line, places, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = entry.run(arguments_of(line, places))
    said = capsys.readouterr().err
    assert code in (1, 2), said
    assert [each for each in said.splitlines() if each.startswith("spalm: ")] == said.splitlines()[-1:]
    assert "Traceback" not in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", said)
    assert not Path(places["OUT"], "transformer").exists()


NUMERIC = sorted(
    {
        re.sub(r"\[.*?\]", "", key)
        for key, default, _ in describe_settings(Recipe)
        if re.fullmatch(r"-?\d+(\.\d+)?|None|required", default)
    }
)
"""Settings of a recipe that take a number, without the kinds of their groups."""


@pytest.mark.parametrize("key", NUMERIC)
def test_a_setting_that_is_accepted_can_be_planned_with(key, places, capsys):
    """Wrong numbers are refused in one line; right ones give a plan."""
    for value in ("-1", ".nan", "1e308", str(2**63 - 1), HUGE):
        code = entry.run(["plan", places["RECIPE"], "--tokens", "1M", "--json", f"{key}={value}"])
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert code == 0 or (code == 1 and len(said.splitlines()) == 1), (value, said)


def test_the_table_is_long():
    assert len(set(CASES)) >= 250
