"""The neighbours of every position: the stage that puts partitions, order, tuning and join together.

Everything large is a file in the stage's folder, and every step leaves behind what it has done, so that a killed run
goes on from there: partitions, the ordered copy of the keys, for each split its queries in order, its plan, and then
the blocks of partitions, which workers answer one by one, each writing its part of the table.
"""

import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from spalm import artifact
from spalm.artifact import write_json
from spalm.console import bar, say
from spalm.corpus import SPLITS, Corpus, Split, TokenSplit
from spalm.errors import InputError
from spalm.memory import Encoder, Memory, source_of_split
from spalm.neighbours.best import NOTHING
from spalm.neighbours.budget import Budget, Estimate, in_words
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.join import Found, Join, Plan, Queries
from spalm.neighbours.ordered import Ordered, boot, mapped, put_in_order
from spalm.neighbours.partitions import POINTS, Partitions, learn_partitions, learn_space
from spalm.neighbours.table import KIND, VERSION, NeighbourTable, id_dtype
from spalm.neighbours.tuning import Judge, tune
from spalm.neighbours.workers import Map, chunks, workers

_RUN = 64
"""Keys are sampled in runs of so many neighbouring rows."""
_ENCODED = 1 << 16
"""Queries encoded between two savings."""


class NeighbourSettings(Exclusion):
    count: int = Field(4, gt=0)
    """Neighbours of every position: K."""
    recall: float = Field(0.95, gt=0, le=1)
    """Share of the true neighbours to be found, measured on a sample of each split."""
    seed: int = Field(1, ge=0)
    """Of the samples and of the partitions."""


def partition_size(keys: int, neighbours: int) -> int:
    """Keys of a partition: more of them in a larger memory, so that partitions do not become too many."""
    return max(2 * neighbours, round(192 * max(1.0, keys / 1e6) ** 0.25))


def find_neighbours(
    memory: Memory,
    encoder: Encoder,
    corpus: Corpus,
    settings: NeighbourSettings,
    directory: Path,
    budget: Budget,
    restart: bool = False,
) -> NeighbourTable:
    """The table at `directory`: made now, continued, or found there."""
    identity = {**encoder.identity, "width": memory.width}
    memory.refuse_others(identity)
    parents = {"memory": memory.digest, "corpus": corpus.digest}

    def make(draft: artifact.Draft) -> tuple[dict[str, Any], list[str]]:
        return _Bulk(memory, encoder, corpus, settings, draft, budget).run(), []

    artifact.stage(directory, KIND, VERSION, settings.as_json(), parents, make, restart)
    return NeighbourTable(directory, memory)


class _Bulk:
    def __init__(
        self, memory: Memory, encoder: Encoder, corpus: Corpus, settings, draft: artifact.Draft, budget: Budget
    ):
        self.memory, self.encoder, self.corpus, self.settings = memory, encoder, corpus, settings
        self.draft, self.budget = draft, budget
        self.work = draft.scratch("work")
        self.work.mkdir(exist_ok=True)
        self.entries = memory.entries()
        if not len(self.entries):
            raise InputError(f"{memory.directory} remembers nothing; add documents with `spalm remember`")

    def run(self) -> dict[str, Any]:
        self._announce()
        with workers(self.budget.workers) as in_parallel:
            partitions = self._partitions(in_parallel)
            with bar("put the keys in order", 2 * len(self.entries)) as shown:
                rows = self.budget.rows(self.entries.width)
                put_in_order(self.entries, partitions, self.work / "keys", rows, in_parallel, shown.advance)
        facts = {split: self._split(split, partitions) for split in SPLITS}
        return {
            "encoder": self.memory.identity,
            "entries": len(self.entries),
            "partitions": len(partitions),
            "scan_width": partitions.space.width,
            "splits": facts,
        }

    def _announce(self) -> None:
        queries = sum(len(self.corpus.split(split)) for split in SPLITS)
        settings, budget = self.settings, self.budget
        estimate = Estimate.of(
            len(self.entries), queries, self.entries.width, settings.count, settings.recall, budget.workers
        )
        say(
            f"neighbours: {queries:,} positions among {len(self.entries):,} keys of width {self.entries.width}; "
            f"about {in_words(estimate.seconds)} on {budget.workers} core(s), "
            f"up to {estimate.disk / 1e9:.1f} GB of disk, {budget.ram / 1e9:.1f} GB of RAM"
        )
        estimate.refuse_unless_it_fits(self.work)

    def _partitions(self, in_parallel: Map) -> Partitions:
        path = self.work / "partitions.safetensors"
        if not path.exists():
            count = max(1, len(self.entries) // partition_size(len(self.entries), self.settings.count))
            with bar(f"learn {count:,} partitions", None):
                space = learn_space(self._sample(1 << 16, 0))
                points = self._sample(min(POINTS * count, self.budget.points(space.width)), 1, space.project)
                learn_partitions(points, space, count, self.settings.seed, in_parallel).save(path)
        return Partitions.load(path)

    def _sample(self, count: int, stream: int, change=lambda keys: torch.from_numpy(keys)) -> np.ndarray:
        """About `count` keys from runs all over the memory, in random order."""
        random = np.random.default_rng([self.settings.seed, stream])
        runs = len(self.entries) // _RUN
        chosen = np.sort(random.choice(runs, min(runs, -(-count // _RUN)), replace=False)) * _RUN
        parts = [change(self.entries.keys(start, start + _RUN)).numpy() for start in chosen]
        rest = change(self.entries.keys(runs * _RUN, len(self.entries))).numpy()
        sample = np.concatenate([*parts, rest])
        return sample[random.permutation(len(sample))]

    def _split(self, split: Split, partitions: Partitions) -> dict[str, Any]:
        """The table of one split, and what is to be said about it."""
        text = self.corpus.split(split)
        job = self._job(text, partitions)
        with workers(self.budget.workers) as in_parallel:
            plan, blocks, judge = self._plan(job, text, in_parallel)
        job = _Job(**{**vars(job), "plan": plan})
        for name, dtype in (("ids", job.id_dtype), ("distances", "<f4")):
            self.draft.declare(f"{split}.{name}", dtype, (len(text), self.settings.count))
            _filled(self.draft.directory / f"{split}.{name}", dtype, (len(text), self.settings.count))
        self._answer(job, blocks)
        for name in ("ids", "distances"):
            _sync(self.draft.directory / f"{split}.{name}")
        ids, distances = job.table()
        positions = job.open().queries.positions(judge.rows)
        recall = judge.recall(Found(ids[positions], distances[positions]))
        matches = self._first_matches(text, ids)
        say(f"neighbours of {split}: recall {recall:.3f}, the first has the right token {matches:.1%} of the time")
        return {"recall": recall, "first_match": matches, "plan": asdict(plan), "judged": len(judge.rows)}

    def _job(self, text: TokenSplit, partitions: Partitions) -> "_Job":
        first_id = self.memory.first_id(source_of_split(self.corpus, text.split))
        if first_id is None:
            source = _Encoded(self.encoder, self.memory, text, self.work / f"{text.split}.queries")
            with bar(f"put {text.split} in order", 2 * len(text)) as shown, workers(self.budget.workers) as in_parallel:
                rows = self.budget.rows(self.entries.width)
                put_in_order(source, partitions, self.work / text.split, rows, in_parallel, shown.advance)
        return _Job(
            work=self.work,
            table_folder=self.draft.directory,
            split=text.split,
            positions=len(text),
            width=self.entries.width,
            first_id=first_id,
            plan=Plan(self.settings.count, self.settings.count, 1, 0.0),
            exclusion=Exclusion(window=self.settings.window, document=self.settings.document),
            id_dtype=id_dtype(int(self.entries.ids(np.array(len(self.entries) - 1)))),
            room=self.budget.room,
        )

    def _plan(self, job: "_Job", text: TokenSplit, in_parallel: Map):
        """How far to look, and in which blocks: decided once, so that a run that goes on is the same run."""
        join = job.open()
        path = self.work / f"{job.split}.plan.json"
        judge = Judge.of(join.keys, join.queries, self.settings.count, job.exclusion, self.settings.seed, in_parallel)
        if not path.exists():
            plan, recall = tune(
                join.keys, join.queries, self.settings.count, job.exclusion, judge, self.settings.recall
            )
            if recall < self.settings.recall:
                say(f"{job.split}: a recall of {self.settings.recall} is out of reach, {recall:.3f} is what can be had")
            size = self.budget.queries(join.keys.partitions.space.width, plan.kept)
            starts = join.queries.ordered.starts
            size = min(size, max(1000, math.ceil(len(text) / (2 * self.budget.workers))))
            write_json(path, {"plan": asdict(plan), "blocks": _blocks(starts, size)})
        stored = json.loads(path.read_text())
        return Plan(**stored["plan"]), stored["blocks"], judge

    def _answer(self, job: "_Job", blocks: list[list[int]]) -> None:
        """Has the workers answer the blocks that are not answered yet."""
        path = self.work / f"{job.split}.done.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        done: list[int] = stored["done"] if stored.get("boot") == boot() else []
        starts = job.open().queries.ordered.starts
        sizes = [int(starts[last] - starts[first]) for first, last in blocks]
        left = [number for number in range(len(blocks)) if number not in done]
        title = f"neighbours of {job.split}"
        with bar(title, sum(sizes), sum(sizes[number] for number in done)) as shown:
            shown.say(f"{job.plan.neighbours} each, reach {job.plan.reach:.2f}")
            for number in _by_workers(job, [blocks[number] for number in left], left, self.budget.workers):
                done.append(number)
                write_json(path, {"done": sorted(done), "boot": boot()})
                shown.advance(sizes[number])

    def _first_matches(self, text: TokenSplit, ids: np.ndarray) -> float:
        """How often the first neighbour's token is the one that comes next."""
        right = counted = 0
        for first, last in chunks(0, len(text), 1 << 20):
            rows = self.entries.rows(ids[first:last, 0].astype(np.int64))
            there = np.flatnonzero(rows >= 0)
            tokens = self.entries.take_tokens(rows[there])
            right += int((tokens == text.targets(first + there)).sum())
            counted += len(there)
        return right / max(1, counted)


@dataclass(frozen=True)
class _Job:
    """All that a worker must know to answer a block: where files are, and how to look."""

    work: Path
    table_folder: Path
    split: str
    positions: int
    width: int
    first_id: int | None
    plan: Plan
    exclusion: Exclusion
    id_dtype: str
    room: int

    def open(self) -> Join:
        return _opened(self)

    def table(self, mode: str = "c") -> tuple[np.ndarray, np.ndarray]:
        shape = (self.positions, self.plan.neighbours)
        ids, distances = (self.table_folder / f"{self.split}.{name}" for name in ("ids", "distances"))
        return mapped(ids, self.id_dtype, shape, mode), mapped(distances, "<f4", shape, mode)


@lru_cache(maxsize=1)
def _opened(job: _Job) -> Join:
    partitions = Partitions.load(job.work / "partitions.safetensors")
    keys = Ordered(job.work / "keys", partitions, job.width, job.room)
    own = keys if job.first_id is not None else Ordered(job.work / job.split, partitions, job.width, job.room)
    return Join(keys, Queries(own, job.first_id, job.positions), job.plan, job.exclusion)


def answer(job: _Job, first: int, last: int) -> None:
    """Finds the neighbours of a block of partitions and writes them to the table. Doing it again changes nothing."""
    positions, found = job.open().block(first, last)
    ids, distances = job.table("r+")
    ids[positions], distances[positions] = found.ids, found.distances


def _by_workers(job: _Job, blocks: list[list[int]], numbers: list[int], count: int) -> Iterator[int]:
    """Answers blocks in processes of their own, yielding the number of each when it is done."""
    # A forked worker begins at once; where forking is not safe, it starts anew.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    try:
        with ProcessPoolExecutor(count, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            running: dict[Future, int] = {}
            todo = list(zip(numbers, blocks))
            while todo or running:
                while todo and len(running) < 2 * count:
                    number, block = todo.pop(0)
                    running[pool.submit(answer, job, *block)] = number
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    yield running.pop(future)
    except BrokenProcessPool:
        raise InputError("a worker was killed, most likely for its memory; give less --ram and run again") from None


class _Encoded:
    """The queries of a split that is not in the memory: its keys, encoded now and kept in a file."""

    def __init__(self, encoder: Encoder, memory: Memory, text: TokenSplit, path: Path):
        self.width = memory.width
        self._count = len(text)
        stride = encoder.reading.stride
        block = stride * max(1, _ENCODED // stride)
        path.touch()
        done = path.stat().st_size // (2 * self.width) // block * block
        with path.open("r+b") as file, bar(f"encode {text.split}", len(text), done) as shown:
            file.truncate(2 * self.width * done)
            file.seek(0, os.SEEK_END)
            for start, stop in chunks(done, len(text), block):
                file.write(encoder.keys(text, start, stop, memory.keys_of, self.width, shown.advance).tobytes())
        self._keys = mapped(path, "<f2", (len(text), self.width))

    def __len__(self) -> int:
        return self._count

    def keys(self, start: int, stop: int) -> np.ndarray:
        return np.array(self._keys[start:stop])

    def labels(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)

    def documents(self, start: int, stop: int) -> np.ndarray:
        return np.full(stop - start, NOTHING)


def _blocks(starts: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Partitions in a row, as many as have at most `size` queries, at least one."""
    blocks, first = [], 0
    while first < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[first] + size, side="right")) - 1
        last = min(max(last, first + 1), len(starts) - 1)
        blocks.append((first, last))
        first = last
    return blocks


def _filled(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """A file of this shape that says of every position: nothing found."""
    if not path.exists():
        table = np.memmap(path.with_suffix(path.suffix + artifact.TEMPORARY), dtype, "w+", shape=shape)
        table[:] = np.inf if np.dtype(dtype).kind == "f" else NOTHING
        path.with_suffix(path.suffix + artifact.TEMPORARY).rename(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
