"""Exact matches: tokens indexed per second, microseconds of a query and bytes of a token, beside infini-gram's.

    exact.json    for each size: both systems, and the ratios infini-gram / spalm in time (above 1: spalm is faster)

Text is Wikipedia (SPALM_DATA names the folder that holds it), tokenised here; where it is too short it is repeated, a
twentieth of its tokens replaced. A query is up to 64 tokens of an article that is not in the index: how long is the
longest end of it that is, how often does it stand there, and what followed? infini-gram is asked by `infgram_ntd` with
as much support as we look at occurrences; we find two shorter matches as well. Each system works in a process of its
own, on one core, and with all cores in bulk, once with all of the machine's memory and once with only --ram of the
index's size, page cache included. A control group enforces the limit, which takes root; without root, or where the
index is smaller than the least limit, only the first is measured. Both indexers write their files anew each time, by
turns; all times are medians.

RAM is that of whole processes: at its peak while indexing (`peak_ram`, at least what this script itself takes), and
after the queries (`resident`), mapped files included. `resident_at_start` is what a process has before it opens the
index.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import gzip
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from bench_disk import control_group, drop_from_cache, no_model
from bench_neighbours import resident
from spalm.compute import Execution, Hardware, available_cores, set_threads
from spalm.console import say
from spalm.corpus import Tokeniser, TokeniserSettings, TokenStream
from spalm.corpus.sources.text_source import locate
from spalm.corpus.tokeniser import learn_tokeniser, tokeniser_from_json
from spalm.files import read_json, write_json
from spalm.lm import Reading
from spalm.memory import Encoder, Memory, MemorySettings, open_memory, remember
from spalm.memory.exact import LONGEST, ExactView, reversed_context
from spalm.memory.exact.matches import OCCURRENCES, SearchedContexts
from spalm.memory.exact.suffixes import sort_contexts

VOCABULARY = 32_000
LEARNED_FROM = 3_000
"""Number of articles from which the tokeniser is learned."""
REPLACED = 0.05
"""Share of the tokens that are replaced where the text is repeated."""
QUERIES, BULK = 1000, 20_000
"""Numbers of queries asked one at a time, and together."""
ROUNDS = 3
"""Number of times that queries are asked in bulk."""
LEAST_RAM = 32 << 20
"""Bytes of the smallest limit, as a process needs some memory besides the index. A smaller index has no limit."""
SEPARATOR, END = 65_535, 65_534
"""Numbers before each document in infini-gram's files, and in its answers where a document ends."""


@dataclass(frozen=True)
class NoKeys(Encoder):
    """An encoder without a model: all keys are zero."""

    def keys(self, stream, start, stop, to_keys, width, progress=lambda _: None):  # noqa: ARG002
        progress(stop - start)
        return np.zeros((stop - start, width), np.float16)


def articles(split: str) -> Iterator[bytes]:
    """Yields the articles of a split of Wikipedia."""
    with gzip.open(locate(f"wikipedia/{split}.txt.gz")) as file:
        lines: list[bytes] = []
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield b"".join(lines)
                lines = []


def tokeniser(folder: Path) -> Tokeniser:
    """Returns the tokeniser, learned by the first call."""
    path = folder / "tokeniser.json"
    if not path.exists():
        settings = TokeniserSettings(kind="bpe", size=VOCABULARY)
        write_json(path, learn_tokeniser(settings, lambda: islice(articles("train"), LEARNED_FROM)).to_json())
    return tokeniser_from_json(read_json(path))


def tokenised(split: str, least: int, folder: Path) -> list[np.ndarray]:
    """Returns the tokens of the first articles of a split, `least` tokens or all there are."""
    own, source, found, count = tokeniser(folder), articles(split), [], 0
    while count < least and (batch := list(islice(source, 500))):
        found += [tokens.astype(np.uint16) for tokens in own.encode(batch)]
        count = sum(map(len, found))
    return found


def text_of(size: int, folder: Path) -> TokenStream:
    """Returns `size` tokens of Wikipedia, repeated with noise where it is shorter."""
    documents = tokenised("train", size, folder)
    once, ends = np.concatenate(documents), np.cumsum([len(tokens) for tokens in documents])
    copies = -(-size // len(once))
    tokens, random = np.tile(once, copies), np.random.default_rng(0)
    for copy in range(1, copies):
        own = tokens[copy * len(once) : (copy + 1) * len(once)]
        places = np.flatnonzero(random.random(len(own), np.float32) < REPLACED)
        own[places] = once[random.integers(0, len(once), len(places))]
    ends = np.concatenate([ends + copy * len(once) for copy in range(copies)])
    return TokenStream(tokens, ends, lambda: [f"article {end}" for end in ends], start=0).beginning(size)


def prepare(size: str, work: Path) -> dict:
    """Makes the memory, infini-gram's files of tokens, and the queries."""
    stream = text_of(int(size), work.parent)
    encoder = NoKeys(
        "none", 1, VOCABULARY, Reading.of(1, segment=64, memory=0, lanes=1), no_model, lambda: torch.device("cpu")
    )
    shutil.rmtree(work / "memory", ignore_errors=True)
    memory = open_memory(work / "memory", encoder, MemorySettings(), stream=stream)
    remember(memory, encoder, stream, source={"size": size})
    (work / "infini-gram").mkdir(exist_ok=True)
    begins = stream.begins
    with_separators = np.insert(stream.tokens, begins, SEPARATOR).astype("<u2")
    with_separators.tofile(work / "infini-gram" / "tokenized.0")
    (2 * (begins + np.arange(len(begins)))).astype("<u8").tofile(work / "infini-gram" / "offset.0")
    others, random = tokenised("test", 1 << 40, work.parent), np.random.default_rng(1)
    queries = []
    for document in random.integers(0, len(others), QUERIES + BULK).tolist():
        end = int(random.integers(1, len(others[document]) + 1))
        queries.append(others[document][max(0, end - LONGEST) : end].tolist())
    write_json(work / "queries.json", queries)
    return {"documents": len(stream.ends)}


def index_spalm(work: Path) -> dict:
    """Measures the making of our index from the tokens of a memory, on one core."""
    memory = Memory(work / "memory")
    shutil.rmtree(memory.exact.folder, ignore_errors=True)
    set_threads(1)
    began = time.perf_counter()
    memory.exact.catch_up(Execution(hardware=Hardware(threads=1)))
    seconds = time.perf_counter() - began
    size = sum(path.stat().st_size for path in memory.exact.folder.rglob("*"))
    return {"seconds": seconds, "bytes": size, "peak_ram": peak_ram(resource.RUSAGE_SELF)}


def index_infini_gram(work: Path) -> dict:
    """Measures infini-gram's indexer on the same tokens, on one core; its own start is left out."""
    folder = work / "infini-gram"
    (folder / "table.0").unlink(missing_ok=True)
    ram = max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 31)
    options = {"data_dir": folder, "save_dir": folder, "token_dtype": "u16", "cpus": 1, "mem": ram, "ulimit": 1024}
    command = [sys.executable, "-m", "infini_gram.indexing", *(f"--{name}={value}" for name, value in options.items())]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = float(told.split("Step 2 (build_sa): Done. Took ")[1].split()[0])
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"seconds": seconds, "bytes": size, "peak_ram": peak_ram(resource.RUSAGE_CHILDREN)}


def peak_ram(whose: int) -> int:
    """Returns the most bytes that were resident at a time, in this process or in the largest of those it started."""
    return 1024 * resource.getrusage(whose).ru_maxrss


Answer = Callable[[list[int]], tuple[int, int]]
"""Function that answers a query: the length of the longest match, and its count."""


def read_queries(work: Path) -> list[list[int]]:
    """Returns the queries: those asked one at a time, then those asked together."""
    return json.loads((work / "queries.json").read_text())


def ask(every: list[list[int]], answer: Answer, bulk: Callable[[list[list[int]]], object], *, limited: bool) -> dict:
    """Measures the microseconds of a query, one at a time and in bulk."""
    single, together = every[:QUERIES], every[QUERIES:]
    if limited:
        single, together = single[: QUERIES // 4], together[: BULK // 20]
    else:  # compiles, and reads everything into RAM that fits
        bulk(together)
        bulk(single)
    taken, answers = [], []
    for query in single:
        began = time.perf_counter()
        answers.append(answer(query))
        taken.append(1e6 * (time.perf_counter() - began))
    in_bulk = []
    for _ in range(1 if limited else ROUNDS):
        began = time.perf_counter()
        bulk(together)
        in_bulk.append(1e6 * (time.perf_counter() - began) / len(together))
    return {
        "microseconds": statistics.median(taken),
        "microseconds_95": float(np.quantile(taken, 0.95)),
        "microseconds_in_bulk": statistics.median(in_bulk),
        "resident": resident(os.getpid()),
        "answers": answers,
    }


def join_group(group: Path | None) -> None:
    """Has this process use the memory of a control group from now on."""
    if group:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def ask_spalm(work: Path, group: Path | None = None) -> dict:
    """Asks our index."""
    set_threads(available_cores())
    queries = read_queries(work)
    some = np.array(queries[0])
    contexts = sort_contexts(some, np.array([len(some)]), np.zeros(1, np.int64), vocabulary=VOCABULARY)
    ExactView([SearchedContexts(contexts)]).find(reversed_context(queries[0]))  # compiles the loops
    join_group(group)
    at_start = resident(os.getpid())
    began = time.perf_counter()
    index = Memory(work / "memory").exact.current()
    opened = time.perf_counter() - began

    def answer(query: list[int]) -> tuple[int, int]:
        found = index.find(reversed_context(query))
        return int(found.lengths[0, 0]), int(found.counts[0, 0])

    def bulk(queries: list[list[int]]) -> object:
        return index.find(np.concatenate([reversed_context(query) for query in queries]))

    return ask(queries, answer, bulk, limited=group is not None) | {
        "seconds_to_open": opened,
        "resident_at_start": at_start,
    }


def ask_infini_gram(work: Path, group: Path | None = None) -> dict:
    """Asks infini-gram's engine."""
    from infini_gram.engine import InfiniGramEngine

    queries = read_queries(work)
    join_group(group)
    at_start = resident(os.getpid())
    began = time.perf_counter()
    engine = InfiniGramEngine(str(work / "infini-gram"), eos_token_id=END, token_dtype="u16")
    opened = time.perf_counter() - began

    def answer(query: list[int]) -> tuple[int, int]:
        found = engine.infgram_ntd(query, max_support=OCCURRENCES)
        return found["suffix_len"], found["prompt_cnt"]

    with ThreadPoolExecutor(available_cores()) as pool:
        fewer = [*queries[:QUERIES], *queries[-BULK // 10 :]]  # it has no call for many queries, and takes long
        asked = ask(fewer, answer, lambda queries: list(pool.map(answer, queries)), limited=group is not None)
    return asked | {"seconds_to_open": opened, "resident_at_start": at_start}


PARTS = {
    "prepare": prepare,
    "index_spalm": index_spalm,
    "index_infini_gram": index_infini_gram,
    "ask_spalm": ask_spalm,
    "ask_infini_gram": ask_infini_gram,
}
"""Parts of this script that run in processes of their own, because what a process has open stays in RAM."""


def in_a_process(part: str, *arguments: Path | str) -> dict:
    """Runs a part in a process of its own."""
    command = [sys.executable, __file__, "--do", part, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def compare(asked: dict[str, dict]) -> dict:
    """Returns the ratios of times, and how often both systems found the same match at as many places."""
    answers = [asked[system].pop("answers") for system in SYSTEMS]
    same = statistics.mean(one == other for one, other in zip(*answers))
    times = "microseconds", "microseconds_95", "microseconds_in_bulk"
    return {name: asked["infini_gram"][name] / asked["spalm"][name] for name in times} | {"same_answers": same}


SYSTEMS = "spalm", "infini_gram"


def measure(size: int, work: Path, ram: float, rounds: int) -> dict:
    """Measures both systems at one size."""
    work.mkdir(parents=True, exist_ok=True)
    row: dict = {"tokens": size, **in_a_process("prepare", str(size), work)}
    built = [{system: in_a_process(f"index_{system}", work) for system in SYSTEMS} for _ in range(rounds)]
    row["index"] = {
        system: {
            "tokens_per_second": size / statistics.median(each[system]["seconds"] for each in built),
            "bytes_per_token": built[0][system]["bytes"] / size,
            "peak_ram": max(each[system]["peak_ram"] for each in built),
        }
        for system in SYSTEMS
    }
    row["index"]["ratio"] = statistics.median(
        each["infini_gram"]["seconds"] / each["spalm"]["seconds"] for each in built
    )
    say(f"{size:,} tokens, index: {row['index']}")
    row["all_ram"] = {system: in_a_process(f"ask_{system}", work) for system in SYSTEMS}
    row["all_ram"]["ratios"] = compare(row["all_ram"])
    say(f"{size:,} tokens, queries: {row['all_ram']}")
    limit = max(LEAST_RAM, int(ram * built[0]["spalm"]["bytes"]))
    if limit >= built[0]["spalm"]["bytes"]:
        row["limited"] = None
        say(f"{size:,} tokens: no limit is set, as the whole index fits the least one of {LEAST_RAM >> 20} MiB")
    elif group := control_group(limit):
        row["limited"] = {"ram": limit}
        for system in SYSTEMS:
            drop_from_cache(work)
            row["limited"][system] = in_a_process(f"ask_{system}", work, group)
        group.rmdir()
        row["limited"]["ratios"] = compare(row["limited"])
        say(f"{size:,} tokens within {limit >> 20} MiB: {row['limited']}")
    return row


def number_of(size: str) -> int:
    """Returns the number that 3M stands for."""
    return int(size[:-1]) * 1_000_000 if size.endswith("M") else int(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/exact.json"))
    parser.add_argument("--sizes", default="3M,30M,300M", help="numbers of tokens")
    parser.add_argument("--ram", type=float, default=0.1, help="share of the index's size within which it is searched")
    parser.add_argument("--rounds", type=int, default=3, help="number of times that the indexes are made")
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        part, first, *others = given.do
        print(json.dumps(PARTS[part](first if part == "prepare" else Path(first), *map(Path, others))))
        return
    out = given.out.absolute()
    rows = []
    for size in given.sizes.split(","):
        rows.append(measure(number_of(size), out.parent / "exact" / size, given.ram, given.rounds))
        write_json(out, {"cores": available_cores(), "queries": [QUERIES, BULK], "sizes": rows})


if __name__ == "__main__":
    main()
