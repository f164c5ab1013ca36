"""The overhead of Ray: keys and neighbours of the same text by the local engine and by Ray, in turn, on the same cores.

    overhead = seconds with Ray / seconds of the local engine - 1, of the medians of a few rounds: ray.json

Each round makes the keys of the first positions of WikiText-2 (an encoder of width 128, as in bench_neighbours.py) and
finds the neighbours of all of them. Starting Ray and its workers, which happens once, is counted separately. Tables and
shards of both engines must have the same bytes. Processor seconds, those of Ray's own processes included, separate
overhead from the load of other processes on the machine.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path

import torch

from bench_neighbours import family, trained_run
from spalm.compute import Engine, Execution, JobPart, ProgressCallback, open_engine, set_threads, split_rows
from spalm.console import say
from spalm.digests import digest_of_file
from spalm.files import write_json
from spalm.memory import MemorySettings, open_memory, remember, source_of_text
from spalm.neighbours import BulkJoin, NeighbourSettings, RamBudget
from spalm.runs import Run

K = 4
WIDTH = 128


class Idle:
    """A job that does nothing but start the workers."""

    def __call__(self, part: JobPart, progress: ProgressCallback) -> None:  # noqa: ARG002
        import spalm.neighbours  # noqa: F401

        time.sleep(1)


def job(run: Run, count: int, engine: Engine, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Returns the seconds of both stages, and the digests of all files that they made."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "table").mkdir(parents=True)
    stream = run.corpus.split("train").beginning(count)
    memory = open_memory(folder / "memory", run.encoder, MemorySettings(), stream=stream)
    used, began = processor_seconds(), time.perf_counter()
    remember(memory, run.encoder, stream, source=source_of_text(stream), execution=Execution(cluster=engine))
    remembered = time.perf_counter()
    settings, budget = NeighbourSettings(count=K), RamBudget.of(8 << 30, engine)
    join = BulkJoin(memory.entries(), settings, folder / "table", work=folder / "work", budget=budget, engine=engine)
    join.announce(count)
    join.prepare()
    join.find("train", count, K, first_id=0)
    ended = time.perf_counter()
    seconds = {"keys": remembered - began, "neighbours": ended - remembered, "seconds": ended - began}
    seconds["processor_seconds"] = processor_seconds() - used
    made = sorted(path for inner in ("memory/shards", "table") for path in (folder / inner).iterdir())
    digests = [digest_of_file(path) for path in made]
    shutil.rmtree(folder)
    return seconds, digests


def processor_seconds() -> float:
    """Returns the processor seconds of this process and its living descendants."""
    ticks = 0
    for process in family(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/ray.json"))
    parser.add_argument("--keys", type=Path, help="folder of the encoder; default beside --out")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=torch.get_num_threads(), help="cores of either engine")
    given = parser.parse_args()
    out = given.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    run, cores = trained_run(WIDTH, (given.keys or out.parent / "keys").absolute()), given.cores
    set_threads(cores)
    measured: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    began = time.perf_counter()
    with open_engine("local", threads=cores) as local, open_engine("ray", threads=cores) as ray:
        list(ray.run_parts(Idle(), split_rows(0, cores, 1), lambda _: None, threads=1))
        start = time.perf_counter() - began
        made = set()
        for number in range(given.rounds):
            for name, engine in (("local", local), ("ray", ray)):
                seconds, digests = job(run, given.count, engine, out.parent / "work-ray")
                measured[name].append(seconds)
                made.add(tuple(digests))
                say(f"round {number + 1}, {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in seconds.items()))
    assert len(made) == 1, "the engines do not agree"
    medians = {
        name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for name, rounds in measured.items()
    }
    overheads = {key: medians["ray"][key] / medians["local"][key] - 1 for key in medians["local"]}
    with_start = (medians["ray"]["seconds"] + start) / medians["local"]["seconds"] - 1
    result = {"overhead": overheads["seconds"], "overhead_with_start": with_start, "overheads": overheads}
    result.update(start_seconds=start, identical=True)
    conditions = {"keys": given.count, "width": WIDTH, "cores": cores}
    write_json(out, {**result, **conditions, "medians": medians, "rounds": measured})
    say(f"overhead of Ray: {overheads['seconds']:.1%} of the time; starting it took {start:.1f} s")


if __name__ == "__main__":
    main()
