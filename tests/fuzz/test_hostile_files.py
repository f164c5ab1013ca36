"""Runs, models and memories that somebody made to harm: a line or an answer, and nothing outside of them is touched."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spalm.memory import Memory, remember, source_of_text
from support.attacked import document_of, replaced_by_copy, uses_of, uses_of_memory
from support.fuzzing import Commands
from support.hostile import (
    change_catalogue,
    change_folder,
    change_json,
    change_kind,
    change_text,
    make_digests_again,
)
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

PARTS = 8
DESCRIPTIONS = (
    "manifest.json",
    "*.yaml",
    "results.json",
    "attached.json",
    "tokeni?er*.json",
    "*config.json",
    "*.names",
)
INDEX = ("index.json", "partitions.safetensors", "SHA256SUMS", "known-digests.json", "memory-choice.json", "*.jsonl")


@pytest.fixture
def victim(tmp_path) -> Iterator[Path]:
    """Files beside the folder that is attacked; they stay as they are."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "below").mkdir()
    for name in ("file", "catalogue.sqlite", "cat.png", "index", "below/list.json", "below/SHA256SUMS"):
        (folder / name).write_text("mine")

    def found() -> list[tuple[Path, int, str]]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [(path, path.stat().st_mtime_ns, path.read_text()) for path in files]

    before = found()
    yield folder / "file"
    assert found() == before


def attack(path: Path, random: np.random.Generator, victim: Path) -> str:
    """Changes a file in one of the ways that there are for its kind; returns what was done."""
    if random.integers(6) == 0:
        return change_kind(path, random, victim)
    if path.suffix == ".sqlite":
        return change_catalogue(path, random)
    return change_json(path, random) if path.suffix == ".json" and random.integers(5) else change_text(path, random)


def described(folder: Path) -> list[Path]:
    """Returns the files of a folder that say what the others are."""
    return sorted({path for pattern in (*DESCRIPTIONS, *INDEX) for path in folder.rglob(pattern)})


@pytest.fixture
def memory(tmp_path) -> Path:
    encoder, text = StubEncoder(), stream(random_texts(np.random.default_rng(3), 9))
    made = new_memory(tmp_path / "whole", encoder)
    remember(made, encoder, text, source=source_of_text(text))
    more = stream(random_texts(np.random.default_rng(4), 3, "more"))
    remember(made, encoder, more, source=source_of_text(more))
    Memory(tmp_path / "whole").exact.current()
    return tmp_path / "whole"


def test_memories_that_were_made_to_harm(memory, random, amount, commands: Commands, victim, tmp_path):
    for _ in range(amount(12, 30)):
        copy = replaced_by_copy(memory, tmp_path / "memory")
        paths = sorted(path for path in copy.rglob("*") if path.is_file() and "shards/" not in str(path))
        catalogue = copy / "catalogue.sqlite"
        path = catalogue if random.integers(2) else Path(str(random.choice(np.array(paths, object))))
        what = attack(path, random, victim)
        make_digests_again(copy, path)
        uses = uses_of_memory(copy)
        for use in random.choice(len(uses), 4, replace=False).tolist():
            commands.run(uses[use], tmp_path, what)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["run_folder", "attached_copy"])
def test_runs_and_models_that_were_made_to_harm(which, request, random, amount, commands: Commands, victim, tmp_path):
    folder = request.getfixturevalue(which)
    name = document_of(folder)
    (tmp_path / "new.txt").write_text("ka1 lo3 mi4 .\n" * 20)
    for number in range(amount(6, 10)):
        copy = replaced_by_copy(folder, tmp_path / which)
        if number % 3 == 2:
            what = change_folder(copy, random, victim)
        else:
            path = Path(str(random.choice(np.array(described(copy), object))))
            what = attack(path, random, victim)
            make_digests_again(copy, path)
        uses = [*uses_of(copy, random, name), ["verify", str(copy)]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of figures that are not finite
            for use in random.choice(len(uses), 3, replace=False).tolist():
                commands.run(uses[use], tmp_path, what)
