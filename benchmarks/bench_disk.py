"""A memory larger than RAM: time of a query through an index on disk, by size, and time to build the index.

    disk.json    for each size: seconds to build, bytes, recall, milliseconds of a query; for small ones in RAM too

Keys are those of bench_neighbours.py (width 512), repeated with noise; queries are such keys with other noise. Each
size is searched in a process of its own, once with all of the machine's memory and once with only --ram of it, page
cache included. A control group enforces the limit, which takes root; without root only the first is measured.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench_neighbours import RepeatedKeys, resident, trained_keys
from spalm.compute import parse_size
from spalm.console import say
from spalm.corpus import TokenStream
from spalm.files import write_json
from spalm.lm import LanguageModel, Reading
from spalm.memory import Encoder, Memory, MemorySettings, open_memory, remember
from spalm.neighbours import IndexKind, IndexSettings, make_searcher, open_searcher

K, MANY = 4, 512
"""Numbers of neighbours: the paper's, and that of an attached model."""
WIDTH = 512
DOCUMENT = 1000
"""Number of entries of a document."""
QUERIES, BATCH = 400, 64
IN_RAM = 4_000_000
"""Number of entries up to which an index in RAM is made too."""


@dataclass(frozen=True)
class CopyingEncoder(Encoder):
    """An encoder without a model: the keys are given."""

    vectors: RepeatedKeys | None = None

    def keys(self, stream, start, stop, to_keys, width, progress=lambda _: None):  # noqa: ARG002
        assert self.vectors is not None
        found = self.vectors.keys(start, stop)
        progress(stop - start)
        return found


def no_model() -> LanguageModel:
    """Stands in for a model that is never loaded."""
    raise AssertionError("keys are copied")


def make_memory(count: int, source: Memory, folder: Path) -> Memory:
    """Returns a memory of `count` repeated keys."""
    encoder = CopyingEncoder(
        "copies",
        WIDTH,
        2,
        Reading.of(1, segment=64, memory=0, lanes=1),
        no_model,
        lambda: torch.device("cpu"),
        vectors=RepeatedKeys(source, count),
    )
    ends = np.arange(DOCUMENT, count + 1, DOCUMENT)
    stream = TokenStream(np.zeros(count, np.int32), ends, lambda: [f"document {end}" for end in ends], start=0)
    memory = open_memory(folder, encoder, MemorySettings(), stream=stream)
    remember(memory, encoder, stream, source={"copies": count})
    return memory


def queries(count: int, source: Memory) -> np.ndarray:
    """Returns queries: keys that would follow the first `count` ones."""
    longer = RepeatedKeys(source, 2 * count)
    chosen = np.random.default_rng(7).integers(count, 2 * count, QUERIES + 4 * BATCH)
    return np.concatenate([longer.keys(row, row + 1) for row in chosen]).astype(np.float32)


def build(memory: Memory, kind: IndexKind, folder: Path) -> dict:
    """Builds an index; returns the seconds, its size and its recall."""
    began = time.perf_counter()
    _, description = make_searcher(memory, folder, IndexSettings(kind=kind, recall=0.95, neighbours=K))
    size = sum(path.stat().st_size for path in folder.iterdir())
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": size, "recall": description.recall, "effort": description.effort}


def search(memory: Path, queries_file: Path, folder: Path, group: Path | None = None) -> dict:
    """Measures the milliseconds of one query at a time and of a batch, in this process, within a control group."""
    if group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    searcher, _ = open_searcher(Memory(memory), folder)
    every = np.load(queries_file)
    if not group:  # warm-up: what fits into RAM is then cached
        searcher.search(every, MANY)
    single, batches = every[:QUERIES], every[QUERIES:].reshape(-1, BATCH, WIDTH)

    def timed(searches: np.ndarray, count: int) -> list[float]:
        """Returns the milliseconds of each search, for one query or a batch."""
        taken = []
        for query in searches:
            began = time.perf_counter()
            searcher.search(np.atleast_2d(query), count)
            taken.append(1000 * (time.perf_counter() - began))
        return taken

    before = bytes_read()
    alone, read = timed(single, K), bytes_read() - before
    return {
        "milliseconds": statistics.median(alone),
        "milliseconds_95": float(np.quantile(alone, 0.95)),
        "milliseconds_in_batch": statistics.median(timed(batches, K)) / BATCH,
        f"milliseconds_for_{MANY}": statistics.median(timed(single[: QUERIES // 4], MANY)),
        "kilobytes_read": read / QUERIES / 1000,
        "resident": resident(os.getpid()),
    }


def bytes_read() -> int:
    """Returns the bytes that this process has read from storage so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def in_a_process(work: str, *arguments: Path | str) -> dict:
    """Runs one part of this script in a process of its own, because files that a process has open stay cached."""
    command = [sys.executable, __file__, "--do", work, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def control_group(ram: int) -> Path | None:
    """Makes a control group whose processes together may use `ram` bytes; None where that is not allowed."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    group = (root / "memory" if old else root) / f"spalm-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(ram))
    except OSError as error:
        say(f"RAM is not limited: {error}")
        return None
    return group


def drop_from_cache(*folders: Path) -> None:
    """Drops files from the page cache. A cached file would not count as memory of the group that reads it."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def storage(folder: Path) -> dict:
    """Measures the disk itself: the time of reading a random page, and the rate of a long read."""
    drop_from_cache(folder)
    shard = max(folder.rglob("*.keys"), key=lambda path: path.stat().st_size)
    places = np.random.default_rng(0).integers(0, shard.stat().st_size // 4096, 200) * 4096
    with shard.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        taken = []
        for place in places.tolist():
            began = time.perf_counter()
            os.pread(file.fileno(), 4096, place)
            taken.append(1000 * (time.perf_counter() - began))
    drop_from_cache(folder)
    began = time.perf_counter()
    size = len(shard.read_bytes())
    return {
        "random_milliseconds": statistics.median(taken),
        "megabytes_per_second": size / 1e6 / (time.perf_counter() - began),
    }


def prepare(count: str, keys: Path, work: Path) -> dict:
    """Makes the memory, its indexes, and queries."""
    source = trained_keys(WIDTH, keys, 1)
    memory = make_memory(int(count), source, work / "memory")
    np.save(work / "queries.npy", queries(int(count), source))
    kinds: list[IndexKind] = ["disk", "faiss"] if int(count) <= IN_RAM else ["disk"]
    return {kind: {"built": build(memory, kind, work / kind)} for kind in kinds}


def measure(count: int, keys: Path, work: Path, ram: int) -> dict:
    """Measures one size, with all of the RAM and within a limit of it."""
    work.mkdir(parents=True, exist_ok=True)
    inputs = work / "memory", work / "queries.npy"
    row: dict = {"keys": count, "bytes_of_keys": 2 * WIDTH * count}
    row.update(in_a_process("prepare", str(count), keys, work))
    for kind in sorted({"disk", "faiss"} & row.keys()):
        row[kind]["all_ram"] = in_a_process("search", *inputs, work / kind)
        say(f"{count:,} keys, {kind}: {row[kind]}")
    group = control_group(ram)
    if group:
        row["storage"], row["ram"] = storage(work), ram
        drop_from_cache(work)
        row["disk"]["limited"] = in_a_process("search", *inputs, work / "disk", group)
        group.rmdir()
        say(f"{count:,} keys within {ram >> 20} MiB: {row['disk']['limited']}; storage {row['storage']}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/disk.json"))
    parser.add_argument("--keys", type=Path, help="folder of the encoder and its memory; default beside --out")
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--ram", default="2G")
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.do:
        part, first, *others = given.do
        paths = map(Path, others)
        print(json.dumps(search(Path(first), *paths) if part == "search" else prepare(first, *paths)))
        return
    out = given.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    keys, rows = (given.keys or out.parent / "keys").absolute(), []
    for count in given.counts:
        rows.append(measure(count, keys, out.parent / "disk" / f"{count}", parse_size(given.ram)))
        write_json(out, {"width": WIDTH, "neighbours": K, "cores": os.cpu_count(), "sizes": rows})


if __name__ == "__main__":
    main()
