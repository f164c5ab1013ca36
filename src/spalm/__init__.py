"""spalm: language models with a short-term and a long-term memory.

    model = spalm.attach("HuggingFaceTB/SmolLM2-135M-Instruct", ["~/articles"], out="runs/attached")
    model = spalm.load("runs/attached")
    answer = model.generate("The striker", max_tokens=40)
    run = spalm.run("demo", out="runs/demo", set={"training.steps": 500})
    graph = spalm.knn_graph("embeddings.npy", k=15, metric="cosine")

The names of `__all__` are the public API. They are imported when they are first used, so `import spalm` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spalm.openmp import spin_briefly

spin_briefly()  # before torch is loaded

if TYPE_CHECKING:
    from spalm.api import CompletedRun, attach, load, register_with_transformers, run
    from spalm.compute import Execution, Hardware
    from spalm.errors import InputError
    from spalm.generation import Answer, Citation, Model, Score, TracedSpan
    from spalm.memory import Memory
    from spalm.neighbours import NeighbourGraph, knn_graph, load_knn_graph
    from spalm.runs import Recipe

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Citation",
    "CompletedRun",
    "Execution",
    "Hardware",
    "InputError",
    "Memory",
    "Model",
    "NeighbourGraph",
    "Recipe",
    "Score",
    "TracedSpan",
    "attach",
    "knn_graph",
    "load",
    "load_knn_graph",
    "register_with_transformers",
    "run",
]

_MODULES = {
    "Answer": "spalm.generation",
    "Citation": "spalm.generation",
    "CompletedRun": "spalm.api",
    "Execution": "spalm.compute",
    "Hardware": "spalm.compute",
    "InputError": "spalm.errors",
    "Memory": "spalm.memory",
    "Model": "spalm.generation",
    "NeighbourGraph": "spalm.neighbours",
    "Recipe": "spalm.runs",
    "Score": "spalm.generation",
    "TracedSpan": "spalm.generation",
    "attach": "spalm.api",
    "knn_graph": "spalm.neighbours",
    "load": "spalm.api",
    "load_knn_graph": "spalm.neighbours",
    "register_with_transformers": "spalm.api",
    "run": "spalm.api",
}
"""Module that defines each public name."""


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
