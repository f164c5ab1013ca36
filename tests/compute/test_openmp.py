"""Threads of OpenMP sleep while they wait, unless the user says otherwise."""

import os
import re
import subprocess
import sys

import pytest

from spalm.openmp import NO_SPINNING, POLICY

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch uses another runtime there")


def displayed(code: str, **given: str) -> dict[str, str]:
    """Returns the settings that the OpenMP runtime itself reports while a program runs."""
    clean = {name: value for name, value in os.environ.items() if name not in {POLICY, *NO_SPINNING}}
    environment = {**clean, "OMP_DISPLAY_ENV": "verbose", **given}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return dict(re.findall(r"(\w+) = '(.*)'", found.stderr))


@pytest.mark.slow
def test_threads_do_not_spin():
    default = displayed("import torch")
    if "GOMP_SPINCOUNT" not in default:
        pytest.skip("torch does not use GNU's runtime here")
    assert default["GOMP_SPINCOUNT"] != "0"
    assert displayed("import spalm, torch")["GOMP_SPINCOUNT"] == "0"
    # The user's own setting wins.
    assert displayed("import spalm, torch", GOMP_SPINCOUNT="123")["GOMP_SPINCOUNT"] == "123"
    active = displayed("import spalm, torch", OMP_WAIT_POLICY="ACTIVE")
    assert int(active["GOMP_SPINCOUNT"]) > 1_000_000


def test_importing_spalm_alone_is_light():
    code = "import sys, os, spalm; print('torch' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    clean = {name: value for name, value in os.environ.items() if name not in {POLICY, *NO_SPINNING}}
    command = [sys.executable, "-c", code, *NO_SPINNING]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    assert found.stdout.split() == ["False", "0", "0"]
