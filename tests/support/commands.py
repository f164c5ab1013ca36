"""The command as a user types it, in a process of its own, and small recipes to run it with.

Most commands run in forks of one process that has loaded the libraries: a new Python would spend its time importing.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "spalm.cli", "transformers.models.llama.modeling_llama"])
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
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        process = _start(command, out, errors, more.get("cwd") or Path.cwd())
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(
            ["spalm", *command],
            process.exitcode,
            *(path.read_text() if path.exists() else "" for path in (out, errors)),
        )


def begun(*arguments: object) -> BaseProcess:
    """Starts a command whose work begins at once, to be killed; what it prints is lost."""
    return _start([*map(str, arguments)], Path(os.devnull), Path(os.devnull), Path.cwd())


def _start(command: list[str], out: Path, errors: Path, folder: Path) -> BaseProcess:
    process = _FORKS.Process(target=_main, args=(command, out, errors, folder))
    process.start()
    return process


def _main(command: list[str], out: Path, errors: Path, folder: Path) -> None:
    """Is the command, in a fork."""
    for number, path in ((1, out), (2, errors)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    import torch

    from spalm.cli import main

    torch.set_num_threads(1)
    sys.argv = ["spalm", *command]
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def refused(*arguments, **more) -> str:
    """What a refused command says: one line, without a traceback."""
    found = spalm(*arguments, **more)
    assert found.returncode == 1, found.stdout + found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("spalm:")]
    assert len(said) == 1, found.stderr
    assert "Traceback" not in found.stderr
    return said[0]
