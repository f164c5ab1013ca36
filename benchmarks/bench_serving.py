"""Many clients at once: `spalm serve` with the memory on, beside llama.cpp's own server with as many slots.

    serving.json    for each number of clients: tokens per second in all, time to first token, and latency of both
                    servers; at the top llama_cpp_8_clients and ours_8_clients (tokens per second in all)

Both servers run the same GGUF file in processes of their own, one at a time, and get the same streamed requests for
greedy completions: each client sends its next request when it has the answer to the last. Prompts are beginnings of
held-out articles on the memory's subject. llama.cpp's server is that of xllamacpp (pip install xllamacpp).
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench_generation import memories, without_test
from footballers import smollm2
from spalm.attachment import Attached
from spalm.compute import Hardware, available_cores
from spalm.console import print_json, say
from spalm.files import write_json

CLIENTS = (1, 4, 8, 16)
TOKENS, PROMPT_TOKENS = 48, 40
"""Numbers of tokens of an answer and of a prompt."""
PATIENCE = 60.0
"""Seconds that a client waits for its first token."""
CONTEXT = 1024
"""Number of tokens of a text in llama.cpp's server."""

LLAMA_CPP = """
import sys, time, xllamacpp
path, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_parallel, settings.n_ctx = path, slots, context * slots
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
settings.kv_unified, settings.cache_prompt = False, True
server = xllamacpp.Server(settings)
print("ready", server.listening_address, flush=True)
time.sleep(1e6)
"""


def percentile_95(values: list[float]) -> float:
    """Returns the 95th percentile of what was measured; never more than the largest value."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


@dataclass
class Measured:
    """What the clients of one server saw."""

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each request."""
    latency: list[float] = field(default_factory=list)
    """Seconds of each request."""
    refused: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Returns the figures by name."""
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "first_token_median": statistics.median(self.first),
            "first_token_95": percentile_95(self.first),
            "latency_95": percentile_95(self.latency),
            "refused": self.refused,
        }


@contextmanager
def running(command: list[str]) -> Iterator[str]:
    """Starts a server, and gives its address as soon as it prints that."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "http://" in line:
                yield "http://" + line.split("http://")[1].split("/")[0].split()[0]
                break
        else:
            raise RuntimeError(f"{command[0]} ended before it served")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def llama_cpp(slots: int) -> list[str]:
    """Returns the command of llama.cpp's own server."""
    return [sys.executable, "-c", LLAMA_CPP, str(smollm2()), str(slots), str(CONTEXT), str(available_cores())]


def ours(folder: Path, slots: int) -> list[str]:
    """Returns the command of our server."""
    command = [sys.executable, "-m", "spalm", "serve", str(folder), "--backend", "llama", "--port", "0"]
    return [*command, "--slots", str(slots)]


async def client(address: str, prompts: list[str], measured: Measured) -> None:
    """Sends requests one after the other and notes what comes."""
    # Each request has a connection of its own: llama.cpp's server may close one just when it is used again.
    alone = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE, limits=alone) as http:
        for prompt in prompts:
            asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
            asked["stream_options"] = {"include_usage": True}
            begun, first, tokens = time.perf_counter(), None, 0
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                if answer.status_code != 200:
                    measured.refused += 1
                    continue
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first = first or time.perf_counter() - begun
                    usage = json.loads(line.removeprefix("data: ")).get("usage")
                    tokens = usage["completion_tokens"] if usage else tokens
            measured.tokens += tokens
            measured.first.append(first or 0.0)
            measured.latency.append(time.perf_counter() - begun)


async def measure(address: str, prompts: list[str], clients: int) -> Measured:
    """Returns what several clients at once see, each with its share of the prompts, one after the other."""
    await client(address, prompts[:1], Measured())  # everything is loaded and compiled
    measured, begun = Measured(), time.perf_counter()
    shares = [prompts[number::clients] for number in range(clients)]
    await asyncio.gather(*(client(address, share, measured) for share in shares))
    measured.seconds = time.perf_counter() - begun
    return measured


def main() -> None:
    """Measures both servers with every number of clients and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/serving.json"))
    parser.add_argument("--work", type=Path, default=Path("runs/bench/attach"), help="folder of the memories")
    parser.add_argument("--attached", type=Path, help="what `spalm attach` made of SmolLM2, instead of that memory")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is measured, in turn")
    parser.add_argument("--requests", type=int, default=48, help="number of requests of all clients together")
    given = parser.parse_args()
    folder = given.attached or memories(given.work, Path(os.environ["SPALM_DATA"]), [])["0.1M entries"]
    folder = without_test(folder, given.work / f"{folder.name}-without-test")
    corpus = Attached(folder, Hardware()).corpus
    test = corpus.split("test")
    repeats = range(1 + given.requests // len(test.begins))
    begins = [int(begin) + 20 * repeat for repeat in repeats for begin in test.begins]
    prompts = [
        corpus.tokeniser.decode(test.tokens[begin : begin + PROMPT_TOKENS].tolist())
        for begin in begins[: given.requests]
    ]
    result: dict = {"cores": available_cores(), "tokens": TOKENS, "clients": {}}
    for count in CLIENTS:
        found: dict[str, list[dict[str, float]]] = {"llama.cpp": [], "ours": []}
        for _ in range(given.rounds):
            for name, command in (("llama.cpp", llama_cpp(count)), ("ours", ours(folder, count))):
                with running(command) as address:
                    found[name].append(asyncio.run(measure(address, prompts, count)).figures())
        result["clients"][count] = {
            name: {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
            for name, rounds in found.items()
        }
        say(f"{count} client(s): {json.dumps(result['clients'][count])}")
        if count >= 8:
            at_8 = result["clients"][8]
            top = {f"{name}_8_clients": at_8[key]["tokens_per_second"] for name, key in _NAMES.items()}
            write_json(given.out, {**top, **result})
    print_json(top)


_NAMES = {"llama_cpp": "llama.cpp", "ours": "ours"}

if __name__ == "__main__":
    main()
