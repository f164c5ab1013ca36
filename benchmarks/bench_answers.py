"""Several answers side by side in one process, without a server: what a pass for all gains over one after another.

    answers.json    by backend and number of answers: tokens per second in all, medians of the rounds, of answers
                    without memory, with it and with drafts, all at once and one after another

All answers continue beginnings of held-out articles on the memory's subject, greedily, by as many tokens. The ways take
turns in each round. How waiting threads of OpenMP spend their time can be chosen as for any program, for example with
GOMP_SPINCOUNT=0 in the environment; `waiting` says what was chosen.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import spalm
from bench_generation import memories, without_test
from generation_systems import prompts_of
from spalm.compute import Execution, available_cores
from spalm.console import print_json, say
from spalm.files import write_json
from spalm.generation import AnswerBatch, AnswerRequest, GenerationOptions, Model, Sampling
from spalm.lm import BatchReader
from spalm.openmp import POLICY, WAITING

TOKENS = 32
"""Number of tokens of an answer."""
WAYS = {
    "without memory": {"use_memory": False, "draft": False},
    "with memory": {"use_memory": True, "draft": False},
    "with memory and drafts": {"use_memory": True, "draft": True},
}


def tokens_per_second(model: Model, slots: int, requests: list[AnswerRequest]) -> float:
    """Returns the speed of all answers together, at most `slots` of them side by side."""
    batch, waiting, tokens, begun = AnswerBatch(model, slots), list(requests), 0, time.perf_counter()
    while waiting or batch.running:
        while waiting and batch.has_room:
            batch.add(waiting.pop(0))
        tokens += sum(chunk.generated for _, chunks in batch.step() for chunk in chunks)
    return tokens / (time.perf_counter() - begun)


def measure(model: Model, prompts: list[list[int]], rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median speed of every way, all answers at once and one after another."""
    found: dict[str, dict[str, list[float]]] = {way: {"at once": [], "one after another": []} for way in WAYS}
    for number in range(rounds + 1):
        for way, chosen in WAYS.items():
            options = GenerationOptions(Sampling(max_tokens=TOKENS), draft=chosen["draft"])
            requests = [AnswerRequest(prompt, options, chosen["use_memory"]) for prompt in prompts]
            for order, slots in (("at once", len(prompts)), ("one after another", 1)):
                speed = tokens_per_second(model, slots, requests)
                if number:  # the first round only warms up
                    found[way][order].append(speed)
    return {way: {order: statistics.median(each) for order, each in orders.items()} for way, orders in found.items()}


def main() -> None:
    """Measures every backend with every number of answers and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/answers.json"))
    parser.add_argument("--work", type=Path, default=Path("runs/bench/attach"), help="folder of the memories")
    parser.add_argument("--attached", type=Path, help="what `spalm attach` made of SmolLM2, instead of that memory")
    parser.add_argument("--answers", type=int, nargs="*", default=[1, 8], help="numbers of answers")
    parser.add_argument("--backends", nargs="*", default=["llama", "torch"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    folder = given.attached or memories(given.work, Path(os.environ["SPALM_DATA"]), [])["0.1M entries"]
    folder = without_test(folder, given.work / f"{folder.name}-without-test")
    waiting = {name: os.environ[name] for name in (POLICY, *WAITING) if name in os.environ}
    result: dict = {"cores": available_cores(), "tokens": TOKENS, "waiting": waiting, "backends": {}}
    for backend in given.backends:
        model = spalm.load(folder, execution=Execution(spalm.Hardware("cpu", available_cores(), backend=backend)))
        result["backends"][backend] = {}
        for count in given.answers:
            if isinstance(model.network, BatchReader):
                model.network.reserve(count)
            prompts = prompts_of(model.models.corpus.split("test"), count)
            result["backends"][backend][count] = measure(model, prompts, given.rounds)
            say(f"{backend}, {count} answer(s): {result['backends'][backend][count]}")
            write_json(given.out, result)
    print_json(result)


if __name__ == "__main__":
    main()
