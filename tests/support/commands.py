"""The command as a user types it, in a process of its own, and small recipes to run it with.

Commands run in forks of one process that has loaded the libraries: a new Python would spend its time importing.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["support.preloaded"])
PATIENCE = 300
"""Seconds that a command may take."""
RANK = """
from spalm.cli import main

try:
    main()
except SystemExit as end:
    if end.code:
        raise
"""
"""A Python file that is spalm on a rank of `torchrun`: it ends well by coming to its end."""
SMALL_RECIPE = """
title: A small run
corpus:
  source: {kind: text, path: PATH, dev_share: 0.1, test_share: 0.1}
  tokeniser: {kind: bpe, size: 300}
network: {layers: 2, width: 16, heads: 2, head_width: 8, feed_forward: 32}
training:
  steps: 20
  batch_size: 4
  segment_length: 8
  memory_length: 8
  optimiser: {learning_rate: 0.01}
  evaluate_every: 10
  seed: 1
evaluation: {unit: perplexity/word, memory_lengths: [8, 32]}
"""
SMALL_SETTINGS = [
    "demo",
    "corpus.source.kind=text",
    "corpus.tokeniser.kind=words",
    "corpus.tokeniser.size=null",
    "network.layers=1",
    "network.width=16",
    "network.heads=2",
    "network.head_width=8",
    "network.feed_forward=16",
    "training.steps=4",
    "training.evaluate_every=4",
    "training.batch_size=2",
    "training.segment_length=8",
    "training.memory_length=4",
]
"""Settings that make the demo small."""


def forks() -> ForkServerContext:
    """Returns the context of multiprocessing whose processes are forks of one that has loaded the libraries."""
    with pytest.MonkeyPatch.context() as patched:  # in Python 3.11 the process to fork from gets no sys.path
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ensure_running()
    return _FORKS


class Fork:
    """A function that is called in a fork as its main program; its names and results are those of `subprocess`."""

    def __init__(self, main: Callable[..., None], *arguments: object, cwd: Path | None = None, **variables: str):
        """`main` gets the arguments as strings; `variables` are set in its environment."""
        self.args = [*map(str, arguments)]
        self._printed = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._out, self._errors = Path(self._printed.name, "out"), Path(self._printed.name, "errors")
        about = (main, self.args, (self._out, self._errors), cwd or Path.cwd(), variables)
        self._process = forks().Process(target=_fork, args=about)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def out(self) -> str:
        """What it has printed up to now."""
        return self._out.read_text() if self._out.exists() else ""

    def errors(self) -> str:
        """What it has printed as errors up to now."""
        return self._errors.read_text() if self._errors.exists() else ""

    def ended(self) -> subprocess.CompletedProcess:
        """Waits for its end."""
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
        return subprocess.CompletedProcess(self.args, self.returncode, self.out(), self.errors())


def spalm(*arguments: object, **more) -> subprocess.CompletedProcess:
    """Runs a command to its end."""
    return begun(*arguments, **more).ended()


def begun(*arguments: object, **more) -> Fork:
    """Starts a command whose work begins at once, in a folder `cwd`, with variables in its environment."""
    return Fork(_spalm, *arguments, **more)


def script(path: Path, *arguments: object) -> Fork:
    """Starts a Python file with arguments."""
    return Fork(_script, path, *arguments)


def torchrun(count: int, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """Runs a Python file on several ranks, with variables in their environment. torchrun and its ranks are forks."""
    how = ("--standalone", "--nproc-per-node", count, "--start-method", "fork", "--run-path")
    return Fork(_torchrun, *how, *arguments, OMP_NUM_THREADS="1", **variables).ended()


def _fork(
    main: Callable[[list[str]], None],
    arguments: list[str],
    printed: tuple[Path, Path],
    folder: Path,
    variables: dict[str, str],
) -> None:
    """Is the fork."""
    for number, path in enumerate(printed, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.update(variables)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # as in a terminal, even if the tests are in the background
    import torch

    torch.set_num_threads(1)
    try:
        main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _spalm(arguments: list[str]) -> None:
    from spalm.cli import main

    sys.argv = ["spalm", *arguments]
    main()


def _script(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def _torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import main

    main(arguments)


def refused(*arguments, **more) -> str:
    """What a refused command says: one line, without a traceback."""
    found = spalm(*arguments, **more)
    assert found.returncode == 1, found.stdout + found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("spalm:")]
    assert len(said) == 1, found.stderr
    assert "Traceback" not in found.stderr
    return said[0]
