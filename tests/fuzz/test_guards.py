"""The guards of the other tests here notice what they are there to notice."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from spalm.cli import entry
from support import fuzzing
from support.fuzz_summary import LEAST, Summary
from support.fuzzing import Commands, Tally


def carried_out(monkeypatch, capsys, inside, what) -> dict[str, list[str]]:
    """Returns the problems of a command that does something."""
    commands = Commands(Tally("guards"), capsys)
    monkeypatch.setattr(entry, "run", what)
    commands.run(["verb"], inside)
    return commands.tally.problems


def test_tracebacks_hangs_and_bad_answers_are_noted(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fuzzing, "PATIENCE", 1)
    assert [*carried_out(monkeypatch, capsys, tmp_path, lambda _: {}["x"])] == ["tracebacks"]
    assert [*carried_out(monkeypatch, capsys, tmp_path, lambda _: time.sleep(30))] == ["hangs"]
    assert [*carried_out(monkeypatch, capsys, tmp_path, lambda _: 1)] == ["other"]  # no line
    assert not carried_out(monkeypatch, capsys, tmp_path, lambda _: 0)


def test_what_is_written_elsewhere_is_noted(monkeypatch, capsys, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    (inside / "link").symlink_to(tmp_path)
    for name, made in (("own", False), ("../other", True), ("link/another", True)):
        found = carried_out(monkeypatch, capsys, inside, lambda _, name=name: (inside / name).write_text(""))
        assert ("outside" in found) == made, name
    for change in (
        lambda _: (tmp_path / "other").unlink() or 0,
        lambda _: (inside / "own").rename(tmp_path / "x") and 0,
    ):
        assert [*carried_out(monkeypatch, capsys, inside, change)] == ["outside"]


@pytest.mark.parametrize("problems", [{}, {"hangs": ["x"]}], ids=["", "hangs"])
@pytest.mark.parametrize("missing", [0, 1])
def test_the_summary_fails_a_run_that_tried_too_little_or_found_anything(tmp_path, problems, missing):
    summary, session = Summary(tmp_path / "out" / "fuzz.json"), SimpleNamespace(exitstatus=0)
    for name, least in LEAST.items():
        tally: dict[str, Any] = {"what": name, "tried": least - missing, "problems": problems, "slowest": [0.0, ""]}
        report: Any = SimpleNamespace(failed=False, when="teardown", user_properties=[("tally", tally)])
        summary.pytest_runtest_logreport(report)
    summary.pytest_sessionfinish(session)  # pyright: ignore[reportArgumentType]
    written = json.loads((tmp_path / "out" / "fuzz.json").read_text())
    assert written["found"]["hangs"] == len(problems) * len(LEAST)
    assert written["tried"]["kills"] == LEAST["kills"] - missing
    assert session.exitstatus == (1 if problems or missing else 0)
