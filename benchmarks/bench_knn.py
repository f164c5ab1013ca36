"""`spalm.knn_graph` beside the libraries that make graphs of neighbours, on real vectors, whole jobs: knn.json

    lm128, lm512    keys of language models trained here on WikiText-2, k = 4 (bench_neighbours.py)
    sentences       embeddings of Wikipedia passages of width 384, k = 15 (sentence_embeddings.py)

Recall is measured on 1,000 queries against exact search, for everybody alike. A set-up is swept from cheap to expensive
until it reaches a recall of 0.95 and then 0.99. Ours is measured before, between and after the others, and the median
counts. What is measured is written at once; the same command goes on after what is there (`--fresh` begins again).
A set-up is stopped when building or a search takes more than ten times (`--limit`) as long as ours, or one and a half
times as long as the best of the same system, both for the highest recall; its row says so, as does that of one that
fails. SPALM_DATA names the folder of the corpora. `--size` vectors are taken of each set, or as many as there are.
"""

import spalm  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import json
import math
import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import knn_peers
from bench_neighbours import medians, trained_keys
from measuring_process import MeasuringProcess, NotMeasured, Subject
from peers import Truth
from sentence_embeddings import sentence_embeddings
from spalm.console import say
from spalm.files import replacing, write_json

JUDGED = 1000
"""Number of queries by which recall is measured."""
TARGETS = [0.95, 0.99]
"""Recalls at which the systems are compared."""
SETS = {"lm128": 4, "sentences": 15, "lm512": 4}
"""Sets of vectors, and k for each."""
OURS = "spalm"
"""Name of our system in the results."""
AGAIN = 8
"""Set-ups of peers between two measurements of ours: load on the machine slows both."""
_LEAST, _LEAST_OF_OWN = 30.0, 5.0
"""Seconds below which no set-up is stopped for being slower than ours, and than others of its system."""
_BEHIND = 1.5
"""Times the best of its own system after which a set-up is stopped: it cannot be the best for any recall any more."""
_LIBRARIES = ["faiss-cpu", "pynndescent", "hnswlib", "usearch", "scann", "numba", "numpy"]
"""Packages whose versions are kept with the results."""


def vectors_of(name: str, folder: Path, size: int) -> Path:
    """Returns the file of the vectors of a set, which is made if it is not in `folder`."""
    path = folder / f"{name}-{size}.npy"
    if not path.exists():
        if name == "sentences":
            keys = sentence_embeddings(folder / "384", size)
        else:
            entries = trained_keys(int(name.removeprefix("lm")), folder, size).entries()
            keys = entries.keys(0, size).astype(np.float32)
        with replacing(path) as unfinished, unfinished.open("wb") as file:
            np.save(file, np.ascontiguousarray(keys))
    return path


@dataclass
class Bench:
    """The measurements of one set of vectors."""

    name: str
    """Name of the set."""
    path: Path
    """File of its vectors."""
    out: Path
    """File of the results."""
    limit: float = 10.0
    """Times ours after which a set-up is stopped."""
    rows: list[dict] = field(default_factory=list)
    """What was measured, of all sets."""

    def __post_init__(self) -> None:
        self.k, self.keys = SETS[self.name], np.load(self.path, mmap_mode="r")
        truth = Truth.of(self.keys, self.k, JUDGED, seed=5)
        self.process = MeasuringProcess(Subject(self.path, self.k, truth, TARGETS))

    def rows_of(self, system: str, set_up: str | None = None) -> list[dict]:
        """Returns what was measured of a system, or of one of its set-ups, on this set."""
        own = [row for row in self.rows if (row["set"], row["system"]) == (self.name, system)]
        return [row for row in own if row["size"] == len(self.keys) and set_up in (None, row["set_up"])]

    def add(self, system: str, set_up: str, recall: float | None, seconds: float | None, settings: str) -> None:
        """Keeps and prints a measurement; without a recall, that the set-up is finished, or why it is not."""
        seconds = None if seconds is None or math.isinf(seconds) else seconds
        row = {"set": self.name, "size": len(self.keys), "width": self.keys.shape[1], "k": self.k, "system": system}
        self.rows.append({**row, "set_up": set_up, "recall": recall, "seconds": seconds, "settings": settings})
        write_json(self.out, {"machine": machine(), "rows": self.rows})
        if recall is not None:
            took = "not timed" if seconds is None else f"in {seconds:.1f} s"
            say(f"{self.name}: {system}: recall {recall:.3f} {took} ({settings})")

    def measure_ours(self) -> None:
        """Measures our graph with the first of some aims that reaches each target on the judge's queries."""
        for target in TARGETS:
            for aim in (target, target + (1 - target) / 4, target + (1 - target) / 2):
                recall, seconds = self.process.ours(aim)
                self.add(OURS, "", recall, seconds, f"recall = {aim:.4g}")
                if recall >= target:
                    break

    @property
    def ours_is_measured(self) -> bool:
        """Whether ours was measured for every target, or could not reach the highest with any aim."""
        aims = {row["settings"] for row in self.rows_of(OURS)}
        reached = max((row["recall"] for row in self.rows_of(OURS)), default=0.0) >= TARGETS[-1]
        return reached or f"recall = {TARGETS[-1] + (1 - TARGETS[-1]) / 2:.4g}" in aims

    def longest(self, system: str) -> float:
        """Returns the seconds after which a set-up is stopped, by what took how long for the highest target."""
        ours, own = self._thorough(OURS), self._thorough(system)
        most = max(_LEAST, self.limit * float(np.median(ours or [row["seconds"] for row in self.rows_of(OURS)])))
        return min(most, max(_LEAST_OF_OWN, _BEHIND * min(own))) if own else most

    def _thorough(self, system: str) -> list[float]:
        """Returns the times of a system for the highest target."""
        rows = [row for row in self.rows_of(system) if row["seconds"] is not None]
        return [row["seconds"] for row in rows if row["recall"] >= TARGETS[-1]]

    def measure_peers(self, systems: list[str]) -> None:
        """Measures every set-up of the libraries that was not measured yet, and ours between them."""
        measured = 0
        for candidate in knn_peers.candidates(self.keys, self.k):
            system, name = candidate.system, candidate.name
            if systems and not any(part in system for part in systems):
                continue
            partly = self.rows_of(system, name)
            if any(row["recall"] is None for row in partly):
                continue
            self.rows = [row for row in self.rows if row not in partly]
            end = "finished"
            try:
                for recall, seconds, settings in self.process.peer(system, name, self.longest(system)):
                    self.add(system, name, recall, seconds, settings)
            except NotMeasured as reason:
                end = str(reason)
                say(f"{self.name}: {system}, {name}: {end}")
            self.add(system, name, None, None, end)
            measured += 1
            if measured % AGAIN == 0:
                self.measure_ours()
        if measured:
            self.measure_ours()


def machine() -> dict:
    """Returns what the figures depend on."""
    versions = {"python": platform.python_version(), "spalm": spalm.__version__}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cores": knn_peers.THREADS, "cpu": models[0].split(": ")[1] if models else "", **versions}


def print_table(rows: list[dict]) -> None:
    """Prints, for each set and target, the fastest set-up of every system that reaches it; and what was stopped."""
    table = Table("set", "recall of at least", "system", "recall", "seconds", "times ours", "settings", box=None)
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name and row["seconds"] is not None]
        for target in TARGETS:
            reached = [row for row in own if row["recall"] >= target]
            best = []
            for system in dict.fromkeys(row["system"] for row in reached):
                of_system = medians([row for row in reached if row["system"] == system])
                best.append(min(of_system, key=lambda row: row["seconds"]))
            ours = next((row["seconds"] for row in best if row["system"] == OURS), float("nan"))
            for row in sorted(best, key=lambda row: row["seconds"]):
                figures = f"{row['recall']:.3f}", f"{row['seconds']:.1f}", f"{row['seconds'] / ours:.1f}"
                table.add_row(name, str(target), row["system"], *figures, row["settings"])
    Console(width=160).print(table)
    for row in rows:
        if row["recall"] is None and row["settings"] != "finished":
            say(f"{row['set']}: {row['system']}, {row['set_up']}: {row['settings']}")
        elif row["recall"] is not None and row["seconds"] is None:
            say(f"{row['set']}: {row['system']}: recall {row['recall']:.3f}, not timed ({row['settings']})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/knn.json"))
    parser.add_argument("--keys", type=Path, help="folder of encoders, memories and embeddings; default beside --out")
    parser.add_argument("--size", type=int, default=1_000_000, help="vectors of each set")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--systems", nargs="+", default=[], help="only peers whose name holds one of these")
    parser.add_argument("--limit", type=float, default=10.0, help="times ours after which a set-up is stopped")
    parser.add_argument("--ours", action="store_true", help="measure ours alone, once more")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() and not given.fresh else []
    shown = []
    for name in given.sets:
        began = time.monotonic()
        path = vectors_of(name, given.keys or given.out.parent / "keys", given.size)
        bench = Bench(name, path, given.out, given.limit, rows)
        try:
            if given.ours or not bench.ours_is_measured:
                bench.measure_ours()
            if not given.ours:
                bench.measure_peers(given.systems)
        finally:
            bench.process.stop()
        rows = bench.rows
        shown += [row for row in rows if (row["set"], row["size"]) == (name, len(bench.keys))]
        say(f"{name}: {(time.monotonic() - began) / 60:.0f} minutes")
    print_table(shown)


if __name__ == "__main__":
    main()
