"""Runs of one small text file with networks so small that a whole one takes seconds."""

from pathlib import Path

from spalm.compute import Execution, Hardware
from spalm.runs import Recipe, Run
from spalm.settings import override


def small_recipe(path: Path, *assignments: str) -> Recipe:
    """A recipe for the text at a path, with settings laid over it."""
    values = {
        "title": "one file",
        "corpus": {"source": {"kind": "text", "path": str(path)}, "tokeniser": {"kind": "words"}},
        "network": {"layers": 1, "width": 16, "heads": 2, "head_width": 8, "feed_forward": 16},
        "training": {
            "steps": 20,
            "batch_size": 4,
            "segment_length": 8,
            "memory_length": 8,
            "optimiser": {"learning_rate": 0.01},
            "evaluate_every": 10,
            "seed": 1,
        },
        "neighbours": {"document": True, "held_out": 8},
        "adaptive": {"passes": 1, "width": 8},
        "evaluation": {"unit": "perplexity/token"},
    }
    return Recipe.parse(override(values, list(assignments)), "test")


def small_run(recipe: Recipe, out: Path) -> Run:
    """A run of it at a folder, on one thread."""
    return Run(recipe, out, Execution(Hardware("cpu", 1)))
