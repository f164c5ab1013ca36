"""Threads of OpenMP spin briefly while they wait, unless the user says otherwise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spalm.openmp import POLICY, WAITING

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch uses another runtime there")


def displayed(code: str, **given: str) -> dict[str, str]:
    """Returns the settings that the OpenMP runtime itself reports while a program runs."""
    clean = {name: value for name, value in os.environ.items() if name not in {POLICY, *WAITING}}
    environment = {**clean, "OMP_DISPLAY_ENV": "verbose", **given}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return dict(re.findall(r"(\w+) = '(.*)'", found.stderr))


def test_threads_spin_briefly():
    """Of torch, only its OpenMP runtime is loaded: that is quick."""
    runtime = next(Path(torch.__file__).with_name("lib").glob("libgomp*"), None)
    if runtime is None:
        pytest.skip("torch does not use GNU's runtime here")
    load = f"import ctypes; ctypes.CDLL({str(runtime)!r})"
    assert displayed(load)["GOMP_SPINCOUNT"] != WAITING["GOMP_SPINCOUNT"]
    assert displayed(f"import spalm; {load}")["GOMP_SPINCOUNT"] == WAITING["GOMP_SPINCOUNT"]
    # The user's own setting wins.
    assert displayed(f"import spalm; {load}", GOMP_SPINCOUNT="123")["GOMP_SPINCOUNT"] == "123"
    active = displayed(f"import spalm; {load}", OMP_WAIT_POLICY="ACTIVE")
    assert int(active["GOMP_SPINCOUNT"]) > 1_000_000


def test_idle_threads_are_ended_and_come_back():
    code = """
import os, spalm, torch
from spalm.openmp import end_idle_threads
torch.set_num_threads(4)
def threads():
    return len(os.listdir("/proc/self/task"))
def work():
    return torch.ones(1 << 22).add_(1).sum().item()
before, expected = threads(), work()
busy = threads()
end_idle_threads()
idle = threads()
print(before < busy, idle < busy, work() == expected, threads() == busy)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"] * 4


def test_importing_spalm_alone_is_light():
    code = "import sys, os, spalm; print('torch' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    clean = {name: value for name, value in os.environ.items() if name not in {POLICY, *WAITING}}
    command = [sys.executable, "-c", code, *WAITING]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    assert found.stdout.split() == ["False", *WAITING.values()]
