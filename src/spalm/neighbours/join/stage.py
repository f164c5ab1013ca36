"""The neighbours of every position: the stage that puts partitions, order, tuning and join together.

Everything large is a file in the stage's folder, and every step leaves behind what it has done, so that a killed run
goes on from there: partitions, the ordered copy of the keys, for each split its queries in order, its plan, and then
the blocks of queries, whose answers go into the table one by one.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from spalm.artifact import TEMPORARY, Draft, Stage, write_json
from spalm.compute import LOCAL, Engine, Execution, JobPart, available_cores, release_freed_memory
from spalm.console import bar, say
from spalm.corpus import SPLITS, Corpus, TokenSplit
from spalm.errors import InputError
from spalm.memory import Encoder, Entries, Memory, source_of_split
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join.cost import Budget, Estimate, in_words, refuse_unless_it_fits
from spalm.neighbours.join.jobs import Answering, Sides
from spalm.neighbours.join.join import Found, Plan
from spalm.neighbours.join.layout import boot, mapped, put_in_order
from spalm.neighbours.join.queries import encode
from spalm.neighbours.join.tuning import Judge, tune
from spalm.neighbours.kernels import MISSING
from spalm.neighbours.partitions import Partitions, partition, partition_size
from spalm.neighbours.table import KIND, VERSION, NeighbourTable, id_dtype
from spalm.neighbours.vectors import Vectors
from spalm.neighbours.workers import Map, chunks, workers


class NeighbourSettings(Exclusion):
    count: int = Field(default=4, gt=0)
    """Neighbours of every training position: K."""
    held_out: int = Field(default=64, gt=0)
    """Neighbours of every dev and test position: as many as kNN-LM may want."""
    recall: float = Field(default=0.95, gt=0, le=1)
    """Share of the true neighbours to be found, measured on a sample of each split."""
    seed: int = Field(default=1, ge=0)
    """Of the samples and of the partitions."""


def find_neighbours(
    memory: Memory,
    encoder: Encoder,
    corpus: Corpus,
    settings: NeighbourSettings,
    directory: Path,
    execution: Execution,
) -> NeighbourTable:
    """The table at `directory`: made now, continued, or found there."""
    memory.require_same_keys({**encoder.identity, "width": memory.width})
    engine = execution.engine
    budget = Budget.of(execution.ram, engine)
    parents = {"memory": memory.digest, "corpus": corpus.digest}

    def fill(draft: Draft) -> tuple[dict[str, Any], list[str]]:
        splits = [corpus.split(split) for split in SPLITS]
        entries = memory.entries()
        if not len(entries):
            raise InputError(f"{memory.directory} remembers nothing; add documents with `spalm remember`")
        bulk = Bulk(entries, settings, draft.directory, draft.scratch("work"), budget, engine)
        held_out = sum(len(text) for text in splits if text.split != "train")
        bulk.announce(len(splits[0]), held_out)
        bulk.prepare()
        facts = {}
        for text in splits:
            first_id = memory.first_id(source_of_split(corpus, text.split))
            if first_id is not None and text.split != "train":
                raise InputError(
                    f"{memory.directory} remembers the {text.split} text; what is evaluated must not be in the memory: "
                    "forget it, or use another memory"
                )
            if first_id is None:
                queries = encode(encoder, memory, text, bulk.work / f"{text.split}.queries", engine)
                answered = bulk.answer(text.split, len(text), settings.held_out, queries=queries)
            else:
                answered = bulk.answer(text.split, len(text), settings.count, first_id=first_id)
            for name, table in (("ids", answered.ids), ("distances", answered.distances)):
                draft.declare(f"{text.split}.{name}", table.dtype, table.shape)
            match = _first_matches(entries, text, answered.ids)
            say(f"neighbours of {text.split}: recall {answered.recall:.3f}; the first has the right token {match:.1%}")
            with_some = float((answered.ids[:, 0] != MISSING).mean())
            if text.split == "train" and not with_some:
                raise InputError(
                    f"no training position has a neighbour: neighbours.document = {settings.document}, "
                    f"neighbours.window = {settings.window}, and the memory holds "
                    f"{len(entries.live_documents)} document(s); set neighbours.document=false or a smaller window"
                )
            facts[text.split] = {
                "recall": answered.recall,
                "first_match": match,
                "with_neighbours": with_some,
                "judged": answered.judged,
                "plan": asdict(answered.plan),
            }
        lineage = memory.lineage()
        return {
            "lineage": lineage,
            "more_texts": len(lineage) - 2,  # besides the kind of keys and the training text
            "entries": len(entries),
            **bulk.facts,
            "splits": facts,
        }, []

    Stage(KIND, VERSION, settings.as_json(), parents).make(directory, fill, restart=execution.restart)
    return NeighbourTable(directory, memory)


@dataclass(frozen=True)
class Answered:
    """The table of some queries, and how it was found."""

    ids: np.ndarray
    distances: np.ndarray
    plan: Plan
    recall: float
    judged: int


class Bulk:
    """A join in files: tables come to be in `folder`, everything else in `work`."""

    def __init__(
        self,
        entries: Vectors,
        settings: NeighbourSettings,
        folder: Path,
        work: Path,
        budget: Budget,
        engine: Engine = LOCAL,
    ):
        self.entries, self.settings, self.folder, self.work = entries, settings, folder, work
        self.budget, self.engine = budget, engine
        work.mkdir(parents=True, exist_ok=True)
        engine.refuse_unless_shared(work)

    @property
    def slots(self) -> int:
        """Workers of all machines."""
        return max(1, self.engine.total_cores * self.budget.workers // self.engine.cores)

    @property
    def _threads_here(self) -> int:
        """For what is not the engine's to do."""
        return min(self.budget.workers, available_cores())

    def announce(self, own: int, others: int = 0) -> None:
        """Says what `own` entries and `others` that ask are going to cost, and refuses what does not fit."""
        settings, width = self.settings, self.entries.width
        table = 12 * (own * settings.count + others * settings.held_out)
        estimate = Estimate.of(len(self.entries), own, others, width, table, settings.recall, self.slots)
        machines = f" of {self.engine.machines} machines" if self.engine.machines > 1 else ""
        each = " on each" if machines else ""
        say(
            f"neighbours: {own + others:,} positions among {len(self.entries):,} keys of width {width}; "
            f"about {in_words(estimate.seconds)} on {self.slots} core(s){machines}, "
            f"up to {estimate.disk / 1e9:.1f} GB of disk, {self.budget.ram / 1e9:.1f} GB of RAM{each}"
        )
        refuse_unless_it_fits(self.folder, estimate.disk, "the table of neighbours")

    def prepare(self) -> None:
        """Learns the partitions and puts the keys in their order."""
        with workers(self._threads_here) as in_parallel:
            self.partitions = self._partitions(in_parallel)
            self._put_in_order(self.entries, "keys", in_parallel)
        release_freed_memory()

    @property
    def facts(self) -> dict[str, int]:
        return {"partitions": len(self.partitions), "scan_width": self.partitions.space.width}

    def _put_in_order(self, vectors: Vectors, name: str, in_parallel: Map) -> None:
        rows, engine = self.budget.rows(vectors.width), (self.engine, self.budget.workers)
        with bar(f"put {name} in order", 2 * len(vectors)) as shown:
            put_in_order(vectors, self.partitions, self.work / name, rows, in_parallel, shown.advance, *engine)

    def _partitions(self, in_parallel: Map) -> Partitions:
        path = self.work / "partitions.safetensors"
        if not path.exists():
            count = max(1, len(self.entries) // partition_size(len(self.entries), self.settings.count))
            partition(self.entries, count, self.settings.seed, self.budget.points, in_parallel).save(path)
        return Partitions.load(path)

    def answer(
        self, name: str, positions: int, count: int, first_id: int | None = None, queries: Vectors | None = None
    ) -> Answered:
        """The `count` neighbours of `positions` queries: vectors of their own, or entries from `first_id` on."""
        last_id = int(self.entries.labels(len(self.entries) - 1, len(self.entries))[0])
        exclusion = Exclusion(window=self.settings.window, document=self.settings.document)
        with workers(self._threads_here) as in_parallel:
            if queries is not None:
                self._put_in_order(queries, name, in_parallel)
            about = self.partitions, self.entries.width, first_id, positions
            sides = Sides(self.work, name, *about, self.budget.room)
            judge = Judge.of(sides.keys, sides.queries, count, exclusion, self.settings.seed, in_parallel)
            plan, blocks = self._plan(sides, count, exclusion, judge)
        table = _Table(self.folder, name, positions, count, id_dtype(last_id))
        table.make()
        release_freed_memory()
        self._work_through(name, Answering(sides, plan, exclusion), table, blocks)
        ids, distances = table.open()
        judged = sides.queries.positions(judge.rows)
        return Answered(ids, distances, plan, judge.recall(Found(ids[judged], distances[judged])), len(judged))

    def _plan(self, sides: Sides, count: int, exclusion: Exclusion, judge: Judge) -> tuple[Plan, list[JobPart]]:
        """How far to look, and in which blocks: decided once, so that a run that goes on is the same run."""
        name, asked = sides.name, sides.queries
        path = self.work / f"{name}.plan.json"
        if not path.exists():
            tuned = tune(sides.keys, asked, count, exclusion, judge, self.settings.recall)
            if tuned.recall < self.settings.recall:
                wanted = self.settings.recall
                say(f"{name}: a recall of {wanted} is out of reach, {tuned.recall:.3f} is what can be had")
            room = self.budget.queries(self.partitions.space.width, tuned.plan.kept, tuned.visits)
            fair = max(1000, math.ceil(asked.count / (2 * self.slots)))
            blocks = chunks(0, len(asked.ordered), min(room, fair))
            write_json(path, {"plan": asdict(tuned.plan), "blocks": blocks})
        stored = json.loads(path.read_text())
        return Plan(**stored["plan"]), [JobPart(number, *block) for number, block in enumerate(stored["blocks"])]

    def _work_through(self, name: str, answering: Answering, table: "_Table", blocks: list[JobPart]) -> None:
        """Has the engine answer the blocks that are not answered yet, and puts each into the table."""
        path = self.work / f"{name}.done.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        done: list[int] = stored["done"] if stored.get("boot") == boot() else []
        left = [block for block in blocks if block.number not in done]
        answering.folder.mkdir(exist_ok=True)
        total = sum(map(len, blocks))
        with bar(f"neighbours of {name}", total, total - sum(map(len, left))) as shown:
            shown.say(f"{answering.plan.neighbours} each, reach {answering.plan.reach:.2f}")
            for block, digest in self.engine.run_parts(
                answering, left, shown.advance, threads=1, per_machine=self.budget.workers
            ):
                table.write(*answering.collect(block, digest))
                done.append(block.number)
                write_json(path, {"done": sorted(done), "boot": boot()})
        table.sync()


def _first_matches(entries: Entries, text: TokenSplit, ids: np.ndarray) -> float:
    """How often the first neighbour's token is the one that comes next."""
    right = counted = 0
    for first, last in chunks(0, len(text), 1 << 20):
        rows = entries.rows(ids[first:last, 0].astype(np.int64))
        there = np.flatnonzero(rows >= 0)
        tokens = entries.take_tokens(rows[there])
        right += int((tokens == text.targets(first + there)).sum())
        counted += len(there)
    return right / max(1, counted)


@dataclass(frozen=True)
class _Table:
    """The files of a split's table while it is made."""

    folder: Path
    name: str
    positions: int
    count: int
    id_dtype: str

    def open(self, mode: str = "c") -> tuple[np.ndarray, np.ndarray]:
        shape = (self.positions, self.count)
        return tuple(mapped(path, dtype, shape, mode) for path, dtype, _ in self._files())  # type: ignore[return-value]

    def write(self, positions: np.ndarray, found: Found) -> None:
        ids, distances = self.open("r+")
        ids[positions], distances[positions] = found.ids, found.distances

    def _files(self) -> list[tuple[Path, str, float]]:
        """Path, type, and what stands in the table where nothing was found."""
        return [
            (self.folder / f"{self.name}.ids", self.id_dtype, MISSING),
            (self.folder / f"{self.name}.distances", "<f4", np.inf),
        ]

    def make(self) -> None:
        for path, dtype, nothing in self._files():
            if not path.exists():
                unfinished = path.with_name(path.name + TEMPORARY)
                unfinished.unlink(missing_ok=True)
                mapped(unfinished, dtype, (self.positions, self.count), "r+")[:] = nothing
                unfinished.rename(path)

    def sync(self) -> None:
        for path, _, _ in self._files():
            with path.open("rb") as file:
                os.fsync(file.fileno())
