"""What the fuzz tests share: how much is tried, the count of what goes wrong, and the folders that are attacked."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from spalm.api import load
from spalm.compute import Execution, Hardware
from spalm.memory import Memory
from spalm.neighbours import IndexSettings, make_searcher
from support.fuzzing import Commands, Tally

FUZZ = "--fuzz"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of several parts has one of them, unless everything is to be tried."""
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(metafunc.module.PARTS if metafunc.config.getoption(FUZZ) else 1))


@pytest.fixture
def random(part) -> np.random.Generator:
    """The random numbers of a part; they are the same each time, unless SPALM_FUZZ_SEED says otherwise."""
    return np.random.default_rng([int(os.environ.get("SPALM_FUZZ_SEED", "0")), part])


@pytest.fixture
def amount(request) -> Callable[[int, int], int]:
    """Chooses between the number of inputs in `make test` and the number that a part has in `make fuzz`."""
    return lambda few, many: many if request.config.getoption(FUZZ) else few


@pytest.fixture
def tally(request) -> Iterator[Tally]:
    """Counts what is tried; the test fails at its end if anything went wrong."""
    found = Tally(request.path.stem.removeprefix("test_"))
    yield found
    request.node.user_properties.append(("tally", found.as_json()))
    assert found.tried
    assert not found.problems, "\n\n".join(
        f"{kind}: {about}" for kind, each in found.problems.items() for about in each[:10]
    )


@pytest.fixture
def commands(tally, capsys, monkeypatch) -> Commands:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Commands(tally, capsys)


@pytest.fixture(scope="session")
def run_folder(finished, tmp_path_factory) -> Path:
    """A finished run with an index on disk."""
    folder = shutil.copytree(finished.directory, tmp_path_factory.mktemp("fuzz") / "run")
    shutil.rmtree(folder / "index", ignore_errors=True)
    make_searcher(Memory(folder / "memory"), folder / "index", IndexSettings(kind="disk"))
    return folder


@pytest.fixture(scope="session")
def attached_copy(attached_folder, tmp_path_factory) -> Path:
    """An attached model with its base model inside, as it is sent to others."""
    folder = tmp_path_factory.mktemp("fuzz") / "attached"
    load(attached_folder, execution=Execution(Hardware("cpu", 1))).to_transformers().save_pretrained(folder)
    make_searcher(Memory(folder / "memory"), folder / "index", IndexSettings(kind="faiss"))
    return folder
