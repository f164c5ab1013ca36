"""The constants of `spalm plan`, measured on one core of this machine: plan.json

    reading    GFLOP/s of a core that makes keys with the network of the recipe wikitext103
    join       what a query of the bulk join reads: keys in the scan space, and whole keys

`gflops` is the rate of the matrix products by which machines are compared. The time of the join is measured by
bench_neighbours.py --only growth, that of the index by bench_disk.py.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_neighbours import FirstKeys, K, trained_keys
from spalm.compute import LOCAL, using_threads
from spalm.console import say
from spalm.files import write_json
from spalm.lm import Transformer, count_flops
from spalm.neighbours import BulkJoin, NeighbourSettings, RamBudget
from spalm.neighbours.join.cost import gflops_of_a_core
from spalm.neighbours.join.join import Join
from spalm.neighbours.join.layout import PartitionedVectors
from spalm.runs import read_recipe

WIDTH = 512
VOCABULARY = 33_060


@torch.inference_mode()
def reading(rounds: int) -> dict:
    """Measures the speed of making keys: hidden states of windows of one segment, without the output layer."""
    recipe = read_recipe("wikitext103", [])
    segment = recipe.training.segment_length
    model = Transformer(recipe.network, VOCABULARY).initialise(0).eval()
    flops = count_flops(recipe.network, VOCABULARY, segment=segment, memory=0, lanes=1).hidden
    with using_threads(1):
        rates, peaks = [], []
        for _ in range(rounds):
            peaks.append(gflops_of_a_core())
            began = time.perf_counter()
            model.hidden(torch.randint(VOCABULARY, (1, segment)), model.empty_state(0, segment))
            rates.append(flops * segment / (time.perf_counter() - began) / 1e9)
    found = {"gflops": statistics.median(peaks), "reading_gflops": statistics.median(rates)}
    return {**found, "mflops_of_a_token": flops / 1e6, "tokens_per_second": found["reading_gflops"] * 1e9 / flops}


class ReadCounter:
    """Context manager that counts what the blocks of a join read; what tuning reads is not counted."""

    def __enter__(self) -> "ReadCounter":
        self.scanned = self.whole = self.fresh = 0
        self._seen, self._lock = threading.local(), threading.Lock()
        self._originals = Join.visit, PartitionedVectors.squared_distances, Join.block
        visit, squared_distances, block = self._originals

        def counting_visit(join, vectors, best, visits):
            seen = getattr(self._seen, "partitions", None)
            if seen is not None:
                read = np.unique(visits.partition)
                sizes = np.diff(join.keys.starts)
                with self._lock:
                    self.scanned += int(sizes[read].sum())
                    self.fresh += sum(int(sizes[number]) for number in read.tolist() if number not in seen)
                seen.update(read.tolist())
            return visit(join, vectors, best, visits)

        def counting_distances(keys, vectors, rows):
            if getattr(self._seen, "partitions", None) is not None:
                with self._lock:
                    self.whole += int((rows >= 0).sum())
            return squared_distances(keys, vectors, rows)

        def counting_block(join, first, last):
            self._seen.partitions = set()
            found = block(join, first, last)
            self._seen.partitions = None
            return found

        _patch(counting_visit, counting_distances, counting_block)
        return self

    def __exit__(self, *_) -> None:
        _patch(*self._originals)


def _patch(visit: Any, squared_distances: Any, block: Any) -> None:
    Join.visit, PartitionedVectors.squared_distances, Join.block = visit, squared_distances, block


def join(vectors: FirstKeys, work: Path) -> dict:
    """Measures what a query of the join reads."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "table").mkdir(parents=True)
    bulk = BulkJoin(
        vectors, NeighbourSettings(count=K), work / "table", work=work / "work", budget=RamBudget.of(8 << 30, LOCAL)
    )
    bulk.prepare()
    with ReadCounter() as reads:
        bulk.find("train", len(vectors), K, first_id=0)
    shutil.rmtree(work)
    count = len(vectors)
    return {
        "keys": count,
        "scan_width": bulk.partitions.space.width,
        "scanned_by_a_query": reads.scanned / count,
        "fresh_by_a_query": reads.fresh / count,
        "whole_keys_by_a_query": reads.whole / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/plan.json"))
    parser.add_argument("--keys", type=Path, help="folder of the encoder and its memory; default beside --out")
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    out = given.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"reading": reading(given.rounds), "join": []}
    say(f"{found['reading']}")
    memory = trained_keys(WIDTH, given.keys or out.parent / "keys", max(given.counts))
    for count in given.counts:
        found["join"].append(join(FirstKeys(memory, count), out.parent / "work-plan"))
        say(f"{found['join'][-1]}")
        write_json(out, found)


if __name__ == "__main__":
    main()
