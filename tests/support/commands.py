"""The command as a user types it, in a process of its own, and small recipes to run it with."""

import subprocess
import sys

SPALM = [sys.executable, "-c", "import torch; torch.set_num_threads(1); from spalm.cli import main; main()"]
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


def spalm(*arguments, **more) -> subprocess.CompletedProcess:
    return subprocess.run([*SPALM, *map(str, arguments)], capture_output=True, text=True, **more)


def refused(*arguments, **more) -> str:
    """What a refused command says: one line, without a traceback."""
    found = spalm(*arguments, **more)
    assert found.returncode == 1, found.stdout + found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("spalm:")]
    assert len(said) == 1, found.stderr
    assert "Traceback" not in found.stderr
    return said[0]
