"""Bad command lines, changed at random: an exit code and at most one line of error each."""

import shlex

import pytest

from support.command_lines import CASES, arguments_of, changed, make_places

PARTS = 5


@pytest.fixture
def places(tmp_path) -> dict[str, str]:
    """What the names stand for; the recipe names a text that is missing, so that nothing runs for long."""
    made = make_places(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(made["TEXT"], made["NOTHING"]))
    return made


@pytest.mark.slow
def test_command_lines_with_random_changes(random, amount, places, commands, tmp_path, monkeypatch):
    """Most of them are wrong in more than one way, and none is carried out for long."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(amount(150, 200)):
        parts = changed(shlex.split(str(random.choice(CASES)).replace("$'", "'")), random)
        commands.run(arguments_of(shlex.join(parts), places), tmp_path)
