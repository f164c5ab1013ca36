"""`spalm.knn_graph` beside the libraries that make graphs of neighbours, on real vectors, whole jobs: knn.json

    lm128, lm512    keys of language models trained here on WikiText-2, k = 4 (bench_neighbours.py)
    sentences       embeddings of Wikipedia passages of width 384, k = 15 (sentence_embeddings.py)

Recall is measured on 1,000 queries against exact search, for everybody alike. A set-up is swept from cheap to expensive
until it reaches a recall of 0.95 and then 0.99. Ours is measured before, between and after the others, and the median
counts. What is measured is written at once; the same command goes on after what is there (`--fresh` begins again).
SPALM_DATA names the folder of the corpora. `--size` vectors are taken of each set.
"""

import spalm  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path

import faiss
import numpy as np
from rich.console import Console
from rich.table import Table

import knn_peers
import peers
from bench_neighbours import medians, trained_keys
from peers import Truth, timed
from sentence_embeddings import sentence_embeddings
from spalm.console import say
from spalm.files import write_json

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


def vectors_of(name: str, folder: Path, size: int) -> np.ndarray:
    """Returns the vectors of a set, which are made if they are not in `folder`."""
    if name == "sentences":
        return sentence_embeddings(folder / "384", size)
    entries = trained_keys(int(name.removeprefix("lm")), folder, size).entries()
    return entries.keys(0, size).astype(np.float32)


@dataclass
class Bench:
    """The measurements of one set of vectors."""

    name: str
    """Name of the set."""
    keys: np.ndarray
    """Its vectors."""
    out: Path
    """File of the results."""
    rows: list[dict] = field(default_factory=list)
    """What was measured, of all sets."""

    def __post_init__(self) -> None:
        self.k = SETS[self.name]
        self.truth = Truth.of(self.keys, self.k, JUDGED, seed=5)

    def rows_of(self, system: str, set_up: str | None = None) -> list[dict]:
        """Returns what was measured of a system, or of one of its set-ups, on this set."""
        own = [row for row in self.rows if (row["set"], row["system"]) == (self.name, system)]
        return [row for row in own if row["size"] == len(self.keys) and set_up in (None, row["set_up"])]

    def add(self, system: str, set_up: str, recall: float | None, seconds: float | None, settings: str) -> None:
        """Keeps and prints a measurement; without a recall, that the set-up is finished."""
        row = {"set": self.name, "size": len(self.keys), "width": self.keys.shape[1], "k": self.k, "system": system}
        self.rows.append({**row, "set_up": set_up, "recall": recall, "seconds": seconds, "settings": settings})
        write_json(self.out, {"machine": machine(), "rows": self.rows})
        if recall is not None:
            say(f"{self.name}: {system}: recall {recall:.3f} in {seconds:.1f} s ({settings})")

    def measure_ours(self) -> None:
        """Measures our graph with the first of some aims that reaches each target on the judge's queries."""
        for target in TARGETS:
            for aim in (target, target + (1 - target) / 4, target + (1 - target) / 2):
                seconds, graph = timed(self._ours, aim)
                recall = self.truth.recall(self.keys, graph.indices[self.truth.rows])
                self.add(OURS, "", recall, seconds, f"recall = {aim:.4g}")
                if recall >= target:
                    break

    def _ours(self, aim: float) -> spalm.NeighbourGraph:
        return spalm.knn_graph(self.keys, self.k, recall=aim, ram=8 << 30)

    def measure_peers(self, systems: list[str]) -> None:
        """Measures every set-up of the libraries that was not measured yet, and ours between them."""
        measured = 0
        for candidate in knn_peers.candidates(self.keys, self.k):
            system, name = candidate.system, candidate.name
            if systems and not any(part in system for part in systems):
                continue
            if any(row["recall"] is None for row in self.rows_of(system, name)):
                continue
            self.rows = [row for row in self.rows if row not in self.rows_of(system, name)]
            try:
                for recall, seconds, settings in peers.measure(candidate.build(), self.keys, self.truth, TARGETS):
                    self.add(system, name, recall, seconds, settings)
            except (RuntimeError, MemoryError) as error:
                say(f"{self.name}: {system}, {name} failed: {error}")
            self.add(system, name, None, None, "finished")
            measured += 1
            if measured % AGAIN == 0:
                self.measure_ours()
        if measured:
            self.measure_ours()


def machine() -> dict:
    """Returns what the figures depend on."""
    return {"cores": faiss.omp_get_max_threads(), "python": platform.python_version(), "spalm": spalm.__version__}


def print_table(rows: list[dict]) -> None:
    """Prints, for each set and target, the fastest set-up of every system that reaches it."""
    table = Table("set", "recall of at least", "system", "recall", "seconds", "times ours", "settings", box=None)
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name and row["recall"] is not None]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/knn.json"))
    parser.add_argument("--keys", type=Path, help="folder of encoders, memories and embeddings; default beside --out")
    parser.add_argument("--size", type=int, default=1_000_000, help="vectors of each set")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--systems", nargs="+", default=[], help="only peers whose name holds one of these")
    parser.add_argument("--ours", action="store_true", help="measure ours alone, once more")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() and not given.fresh else []
    for name in given.sets:
        keys = vectors_of(name, given.keys or given.out.parent / "keys", given.size)
        bench = Bench(name, keys, given.out, rows)
        if given.ours or not bench.rows_of(OURS):
            bench.measure_ours()
        if not given.ours:
            bench.measure_peers(given.systems)
        rows = bench.rows
    print_table([row for row in rows if row["size"] == given.size])


if __name__ == "__main__":
    main()
