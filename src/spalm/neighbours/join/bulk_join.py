"""The bulk join of a memory, in files: partitions, layout, tuning and join put together.

Every step leaves behind what it has done, so that a killed run goes on from there: partitions, the keys in the
partitioned layout, for each split its queries in the same layout, its plan, and then the blocks of queries, whose
neighbours go into the table one by one.
"""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from pydantic import BaseModel, Field

from spalm.compute import LOCAL, Engine, JobPart, available_cores, release_freed_memory
from spalm.console import bar, say
from spalm.files import read_json, replacing, write_json
from spalm.memory import MISSING
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join.cost import JoinEstimate, JoinWorkload, RamBudget, format_seconds, plan_seconds
from spalm.neighbours.join.jobs import JoinInputs, JoinJob
from spalm.neighbours.join.join import JoinPlan, JoinTask, NearestEntries
from spalm.neighbours.join.layout import partition_on_disk
from spalm.neighbours.join.tuning import RecallSample, TunedPlan, tune_join
from spalm.neighbours.parallel import ParallelMap, Workers, chunks, thread_map
from spalm.neighbours.partitions import Partitions, learn_partitions, partition_size
from spalm.neighbours.recall import HALF_PRECISION, Tolerance
from spalm.neighbours.scratch_files import boot_id, check_disk_space, map_array, release
from spalm.neighbours.table import id_dtype
from spalm.neighbours.vectors import Vectors, key_type
from spalm.settings import Seed

_WRITTEN, _FILLED = 1 << 12, 1 << 16
"""Rows of a table that are written together: anywhere in it, and one after another."""
_SMALL_TABLE = 32 << 20
"""Bytes of a table whose pages may stay in RAM while it is written."""


class NeighbourSettings(Exclusion):
    """Settings of the search for neighbours: their number, the recall to reach, and the rule of exclusion."""

    count: int = Field(default=4, gt=0)
    """Number of neighbours of every training position: K."""
    held_out: int = Field(default=64, gt=0)
    """Number of neighbours of every dev and test position: as many as kNN-LM may want."""
    recall: float = Field(default=0.95, gt=0, le=1)
    """Share of the true neighbours to be found, measured on a sample of each split."""
    seed: Seed = 1
    """Seed of the random samples and of the partitions."""


@dataclass(frozen=True)
class SplitNeighbours:
    """The finished neighbours of a split's positions, and how they were found."""

    ids: Int[np.ndarray, "positions count"]
    """Entry ids of the neighbours, nearest first; MISSING where there is none."""
    distances: Float[np.ndarray, "positions count"]
    """Squared distances of the neighbours; infinite where there is none."""
    plan: JoinPlan
    """Plan by which the join has searched."""
    recall: float
    """Recall, measured on a sample of the positions by which the join was not tuned."""
    judged: int
    """Number of positions in the sample."""


class _StoredPlan(BaseModel):
    """The file of a plan."""

    plan: JoinPlan
    blocks: list[tuple[int, int]]


class BulkJoin:
    """Finds the neighbours of many positions. Tables are written to `folder`, everything else to `work`."""

    def __init__(
        self,
        entries: Vectors,
        settings: NeighbourSettings,
        folder: Path,
        *,
        work: Path,
        budget: RamBudget,
        engine: Engine = LOCAL,
    ):
        self.entries, self.settings, self.folder, self.work = entries, settings, folder, work
        self.budget, self.engine = budget, engine
        work.mkdir(parents=True, exist_ok=True)
        engine.refuse_unless_shared(work)

    @property
    def slots(self) -> int:
        """Number of workers on all machines together."""
        return max(1, self.engine.total_cores * self.budget.workers // self.engine.cores)

    @property
    def _key_bytes(self) -> int:
        """Bytes of a whole key."""
        return self.entries.width * np.dtype(key_type(self.entries)).itemsize

    @property
    def _threads_here(self) -> int:
        """Number of threads for what this process does itself."""
        return min(self.budget.workers, available_cores())

    def announce(self, own: int, others: int = 0, *, more_disk: int = 0) -> None:
        """Prints the expected cost of a join for `own` queries that are entries and `others` that are not.

        Raises an error if the disk is too small for it and `more_disk` bytes.
        """
        settings, width = self.settings, self.entries.width
        table = 12 * (own * settings.count + others * settings.held_out)
        load = JoinWorkload(
            keys=len(self.entries),
            own=own,
            others=others,
            width=width,
            table_bytes=table + more_disk,
            key_bytes=self._key_bytes // width,
            neighbours=settings.count,
        )
        estimate = JoinEstimate.of(load, settings.recall, self.slots)
        machines = f" of {self.engine.machines} machines" if self.engine.machines > 1 else ""
        each = " on each" if machines else ""
        say(
            f"neighbours: {own + others:,} positions among {len(self.entries):,} keys of width {width}; "
            f"about {format_seconds(estimate.seconds)} on {self.slots} core(s){machines}, "
            f"up to {estimate.disk / 1e9:.1f} GB of disk, {self.budget.ram / 1e9:.1f} GB of RAM{each}"
        )
        check_disk_space(self.folder, estimate.disk, "the table of neighbours")

    def prepare(self) -> None:
        """Learns the partitions and brings the keys into the partitioned layout."""
        with thread_map(self._threads_here) as parallel:
            self.partitions = self._partitions(parallel)
            self._partition_on_disk(self.entries, "keys", parallel)
        release_freed_memory()

    @property
    def facts(self) -> dict[str, int]:
        """Facts about the partitions that the table's manifest keeps."""
        return {"partitions": len(self.partitions), "scan_width": self.partitions.space.width}

    def _partition_on_disk(self, vectors: Vectors, name: str, parallel: ParallelMap) -> None:
        """Makes the partitioned layout of vectors in the folder `name`."""
        with bar(f"put {name} in order", 2 * len(vectors)) as shown:
            partition_on_disk(
                vectors,
                self.partitions,
                self.work / name,
                block=self.budget.rows(self._key_bytes),
                workers=Workers(parallel, self.engine, self.budget.workers),
                progress=shown.advance,
            )

    def _partitions(self, parallel: ParallelMap) -> Partitions:
        """Returns the partitions; learns them first unless an earlier run has left them."""
        path = self.work / "partitions.safetensors"
        if not path.exists():
            count = max(1, len(self.entries) // partition_size(len(self.entries), self.settings.count))
            learn_partitions(
                self.entries, count, self.settings.seed, most_points=self.budget.points, parallel=parallel
            ).save(path)
        return Partitions.load(path)

    def find(
        self,
        name: str,
        positions: int,
        count: int,
        *,
        first_id: int | None = None,
        queries: Vectors | None = None,
        tolerance: Tolerance = HALF_PRECISION,
    ) -> SplitNeighbours:
        """Finds the `count` neighbours of `positions` queries: entries from `first_id` on, or the vectors `queries`.

        Both are given where the entries are other vectors as queries. Then, too, no entry finds itself.
        """
        last_id = int(self.entries.labels(len(self.entries) - 1, len(self.entries))[0])
        exclusion = Exclusion(window=self.settings.window, document=self.settings.document)
        with thread_map(self._threads_here) as parallel:
            if queries is not None:
                self._partition_on_disk(queries, name, parallel)
            inputs = JoinInputs(
                self.work,
                name,
                self.partitions,
                self.entries.width,
                first_id,
                positions,
                self.budget.room,
                separate=queries is not None,
                dtype=key_type(self.entries),
            )
            task = inputs.task(count, exclusion, tolerance)
            tuning, judging = RecallSample.of(task, self.settings.seed, parallel).split()
            plan, blocks = self._plan(name, task, tuning)
        table = _TableFiles(self.folder, name, positions, count, id_dtype(last_id))
        table.make()
        release_freed_memory()
        self._fill_table(JoinJob(inputs, plan, exclusion), table, blocks)
        ids, distances = table.open()
        judged = inputs.queries.positions(judging.rows)
        return SplitNeighbours(ids, distances, plan, judging.recall(distances[judged]), len(judged))

    def _plan(self, name: str, task: JoinTask, sample: RecallSample) -> tuple[JoinPlan, list[JobPart]]:
        """Returns the plan and the blocks of queries: decided once, so that a resumed run is the same run."""
        path = self.work / f"{name}.plan.json"
        if not path.exists():
            tuned = tune_join(task, sample, self.settings.recall)
            if tuned.recall < self.settings.recall:
                wanted = self.settings.recall
                say(f"{name}: a recall of {wanted} is out of reach, {tuned.recall:.3f} is what can be had")
            self._announce_plan(name, task, tuned)
            fitting = self.budget.queries(self.partitions.space.width, tuned.plan.kept, tuned.visits)
            fair = max(1000, math.ceil(task.queries.count / (2 * self.slots)))
            blocks = chunks(0, len(task.queries.vectors), min(fitting, fair))
            write_json(path, {"plan": asdict(tuned.plan), "blocks": blocks})
        stored = read_json(path, _StoredPlan, remedy="give --restart to begin again")
        return stored.plan, [JobPart(number, *block) for number, block in enumerate(stored.blocks)]

    def _announce_plan(self, name: str, task: JoinTask, tuned: TunedPlan) -> None:
        """Prints how long the join itself is expected to take by its plan."""
        width, partitions = self.partitions.space.width, len(self.partitions)
        scanned = len(task.keys) / partitions * (1 + tuned.visits)
        fetched = tuned.plan.kept * self.entries.width
        seconds = plan_seconds(task.queries.count, scanned + tuned.plan.near, width, fetched=fetched) / self.slots
        others = f"{tuned.visits:.1f} of {partitions:,} partitions besides its own"
        say(f"{name}: each is compared with {others}; about {format_seconds(seconds)}")

    def _fill_table(self, job: JoinJob, table: "_TableFiles", blocks: list[JobPart]) -> None:
        """Has the engine do the blocks that are left, and writes each into the table."""
        path = self.work / f"{table.name}.done.json"
        stored = read_json(path, dict, remedy="give --restart to begin again") if path.exists() else {}
        done: list[int] = stored["done"] if stored.get("boot") == boot_id() else []
        left = [block for block in blocks if block.number not in done]
        job.folder.mkdir(exist_ok=True)
        total = sum(map(len, blocks))
        with bar(f"neighbours of {table.name}", total, total - sum(map(len, left))) as shown:
            shown.say(f"{job.plan.neighbours} each, reach {job.plan.reach:.2f}")
            for block, digest in self.engine.run_parts(
                job, left, shown.advance, threads=1, per_machine=self.budget.workers
            ):
                table.write(*job.collect(block, digest))
                done.append(block.number)
                write_json(path, {"done": sorted(done), "boot": boot_id()})
        table.sync()


@dataclass(frozen=True)
class _TableFiles:
    """The files of a split's neighbour table while it is made."""

    folder: Path
    """Folder of the files."""
    name: str
    """Name of the split."""
    positions: int
    """Number of positions."""
    count: int
    """Number of neighbours of each position."""
    id_dtype: str
    """Type of the entry ids."""

    def open(self, mode: Literal["c", "r+"] = "c") -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids and the distances as mapped arrays."""
        shape = (self.positions, self.count)
        ids, distances = (map_array(path, dtype, shape, mode=mode) for path, dtype, _ in self._files())
        return ids, distances

    def write(self, positions: Int[np.ndarray, "queries"], found: NearestEntries) -> None:
        """Writes the neighbours of these positions."""
        arrays = self.open("r+")
        # A row may lie anywhere: each may bring a page of each file into RAM.
        for first, last in chunks(0, len(positions), _WRITTEN):
            for array, rows in zip(arrays, (found.ids, found.distances)):
                array[positions[first:last]] = rows[first:last]
            if sum(array.nbytes for array in arrays) > _SMALL_TABLE:
                release(*arrays)

    def _files(self) -> list[tuple[Path, str, float]]:
        """Returns path, type, and the value that means no neighbour, of each file."""
        return [
            (self.folder / f"{self.name}.ids", self.id_dtype, MISSING),
            (self.folder / f"{self.name}.distances", "<f4", np.inf),
        ]

    def make(self) -> None:
        """Makes the files that are missing, without any neighbours."""
        for path, dtype, nothing in self._files():
            if not path.exists():
                with replacing(path, sync=False) as unfinished:
                    table = map_array(unfinished, dtype, (self.positions, self.count), mode="r+")
                    for first, last in chunks(0, self.positions, _FILLED):
                        table[first:last] = nothing
                        release(table)

    def sync(self) -> None:
        """Waits until the files are on disk."""
        for path, _, _ in self._files():
            with path.open("rb") as file:
                os.fsync(file.fileno())
