"""A run whose text holds facts that only a memory can know, and signs that a careless page or picture trips over."""

import json
from pathlib import Path

import numpy as np

from spalm.compute import Execution, Hardware
from spalm.runs import Recipe, Run

SCRIPT = "<script>alert(1)</script>"
NAMES = [SCRIPT, "$a_1$", *(f"{kind}{number}" for kind in ("ka", "lo", "mi", "nu") for number in range(30))][:120]
FACTS = 600


def _text(random: np.random.Generator, facts: np.ndarray, count: int) -> str:
    """Lines of three names: the third is a matter of the first two, but of neither alone."""
    return "".join(
        " ".join(NAMES[name] for name in facts[row]) + " .\n" for row in random.integers(0, len(facts), count)
    )


def write_texts(folder: Path, documents: int = 24) -> None:
    """Writes the splits of a corpus, with a number of documents to train on."""
    random = np.random.default_rng(0)
    facts = random.integers(0, len(NAMES), (FACTS, 3))
    for name, count in (("train", documents), ("valid", 3), ("test", 3)):
        lines = [{"id": _name(name, i), "text": _text(random, facts, 150)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_documents(folder: Path, documents: int = 30) -> None:
    """Writes the same kind of text for a pretrained model, a number of files."""
    random = np.random.default_rng(0)
    facts = random.integers(2, len(NAMES), (200, 3))
    for number in range(documents):
        (folder / f"doc{number}.txt").write_text(_text(random, facts, 40))


def _name(split: str, number: int) -> str:
    """Names need not be harmless, nor differ: the last two of a split are namesakes."""
    return f"{split}-{min(number, 22 if split == 'train' else 1)}<img src=x onerror=alert(2)>"


def make_run(texts: Path, out: Path) -> Run:
    recipe = Recipe.parse(
        {
            "title": "facts <b>",
            "corpus": {"source": {"kind": "text", "path": str(texts)}, "tokeniser": {"kind": "words"}},
            "network": {"layers": 2, "width": 32, "heads": 2, "head_width": 16, "feed_forward": 48},
            "training": {
                "steps": 300,
                "batch_size": 8,
                "segment_length": 32,
                "memory_length": 16,
                "optimiser": {"learning_rate": 0.01, "warm_up": 20, "clip": 1.0},
                "evaluate_every": 100,
                "seed": 1,
            },
            "neighbours": {"document": True, "held_out": 16},
            "spalm": {"start": 0.4, "gate": {"bias": 0.0}},
            "adaptive": {"passes": 4, "batch_size": 256, "width": 16},
            "evaluation": {"unit": "perplexity/token"},
            "controls": True,
            "extended": True,
        },
        "test",
    )
    return Run(recipe, out, Execution(Hardware("cpu", 1)))
