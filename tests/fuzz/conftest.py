"""What the fuzz tests share: how much is tried, and the count of what goes wrong."""

import os
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from support.attacked import ask
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
    if "huggingface_hub.constants" in sys.modules:  # an earlier test imported it, so the variable was read before
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("spalm.server.serve", ask)
    return Commands(tally, capsys)
