"""The command as a user types it, in a process of its own, and small recipes to run it with.

Most commands run in forks of one process that has loaded the libraries: a new Python would spend its time importing.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["support.preloaded"])
PATIENCE = 300
"""Seconds that a command may take."""
SPALM = [sys.executable, "-c", "import torch; torch.set_num_threads(1); from spalm.cli import main; main()"]
_PLAIN = SPALM
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


def spalm(*arguments: object, **more) -> subprocess.CompletedProcess:
    """Runs a command to its end. With an environment or a standard input, in a Python of its own."""
    command = [*map(str, arguments)]
    if set(more) - {"cwd"} or SPALM is not _PLAIN:
        return subprocess.run([*SPALM, *command], capture_output=True, text=True, **more)
    return _ended(_spalm, command, more.get("cwd") or Path.cwd())


def begun(*arguments: object) -> BaseProcess:
    """Starts a command whose work begins at once, to be killed; what it prints is lost."""
    return _start(_spalm, [*map(str, arguments)], Path(os.devnull), Path(os.devnull), Path.cwd())


def begun_script(*arguments: object) -> BaseProcess:
    """Starts a Python file with arguments, likewise."""
    return _start(_script, [*map(str, arguments)], Path(os.devnull), Path(os.devnull), Path.cwd())


def script(*arguments: object) -> subprocess.CompletedProcess:
    """Runs a Python file with arguments to its end."""
    return _ended(_script, [*map(str, arguments)], Path.cwd())


def torchrun(count: int, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """Runs a Python file on several ranks, with variables in their environment. torchrun and its ranks are forks."""
    how = ["--standalone", "--nproc-per-node", count, "--start-method", "fork", "--run-path"]
    return _ended(partial(_torchrun, variables), [*map(str, (*how, *arguments))], Path.cwd())


def _ended(main: Callable[[list[str]], None], command: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Runs a function in a fork to its end."""
    with tempfile.TemporaryDirectory() as printed:
        out, errors = Path(printed, "out"), Path(printed, "errors")
        process = _start(main, command, out, errors, folder)
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(
            command, process.exitcode, *(path.read_text() if path.exists() else "" for path in (out, errors))
        )


def _start(main: Callable[[list[str]], None], command: list[str], out: Path, errors: Path, folder: Path) -> BaseProcess:
    with pytest.MonkeyPatch.context() as patched:  # in Python 3.11 the process to fork from does not get our sys.path
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ensure_running()
    process = _FORKS.Process(target=_fork, args=(main, command, out, errors, folder))
    process.start()
    return process


def _fork(main: Callable[[list[str]], None], command: list[str], out: Path, errors: Path, folder: Path) -> None:
    """Calls a function in a fork, where it is the main program."""
    for number, path in ((1, out), (2, errors)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    try:
        main(command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _spalm(command: list[str]) -> None:
    from spalm.cli import main

    sys.argv = ["spalm", *command]
    main()


def _script(command: list[str]) -> None:
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def _torchrun(variables: dict[str, str], command: list[str]) -> None:
    from torch.distributed.run import main

    os.environ.update(variables, OMP_NUM_THREADS="1")
    main(command)


def refused(*arguments, **more) -> str:
    """What a refused command says: one line, without a traceback."""
    found = spalm(*arguments, **more)
    assert found.returncode == 1, found.stdout + found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("spalm:")]
    assert len(said) == 1, found.stderr
    assert "Traceback" not in found.stderr
    return said[0]
