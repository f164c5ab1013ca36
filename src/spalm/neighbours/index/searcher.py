"""Searching a memory for live queries, with any index: what is found is alive, in order, and by whole keys.

What was remembered after the index was made is searched exactly beside it, what was forgotten is dropped, so an index
need not be up to date for an answer to be.
"""

import errno
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError

from spalm.artifact import digest_of_json, only_writer, write_json
from spalm.compute import LOCAL, Engine
from spalm.console import bar, say
from spalm.errors import InputError
from spalm.memory import Entries, Memory
from spalm.neighbours.exact import nearest
from spalm.neighbours.exclusion import ONLY_ITSELF, STRANGER, Askers, Exclusion
from spalm.neighbours.index.contract import FILES, Index, Kind, build_index, load_index
from spalm.neighbours.kernels import MISSING
from spalm.neighbours.workers import Map, chunks, in_turn, workers

DESCRIPTION = "index.json"
_JUDGED = 256
_MARGIN = 16
"""Candidates asked for beyond those wanted: for forgotten ones, and for those that codes put in the wrong order."""
_MOST = 1 << 16
"""Candidates that are asked for at most, however many of them are dead."""
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Description:
    """What an index on disk says of itself."""

    kind: Kind
    lineage: list[str]
    """Of the memory when the index was made: an index of other keys is refused."""
    upto: int
    """It holds the entries with lower ids that were alive when it was made."""
    effort: int
    recall: float | None
    """Against exact search, on a sample of entries asked for their neighbours; None if there was nothing to ask."""


class Searcher:
    """Finds neighbours in a memory through an index. `upto`: entries with lower ids are the index's, others are not."""

    def __init__(self, memory: Memory, index: Index, upto: int, in_parallel: Map = in_turn):
        self.memory, self.index, self.upto = memory, index, upto
        self._in_parallel = in_parallel
        self.searched = 0
        """Queries so far."""

    def search(
        self,
        queries: Float[np.ndarray, "n width"],
        count: int,
        own: Int[np.ndarray, "n"] | None = None,
        exclusion: Exclusion = ONLY_ITSELF,
        below: int | None = None,
    ) -> tuple[Int[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
        """(ids, squared distances), nearest first; MISSING and infinity where there are not enough.

        `own` are the queries' ids, where they are entries themselves: they do not find themselves. `below`: only
        entries with lower ids are found, as if nothing had been remembered since.
        """
        self.searched += len(queries)
        entries = self.memory.entries()
        own = np.full(len(queries), STRANGER) if own is None else own
        askers = _askers(entries, own, exclusion)
        last = len(entries) if below is None else entries.first_row(below)
        recent = self._recent(queries, count, entries, askers, last)
        ids = np.full((len(queries), count), MISSING, np.int64)
        distances = np.full(ids.shape, np.inf, np.float32)
        asking, wanted = np.arange(len(queries)), count + _MARGIN
        while True:
            proposed = self.index.candidates(queries[asking], wanted)
            usable = proposed if below is None else np.where(proposed < below, proposed, MISSING)
            every = np.concatenate([usable, recent[asking]], 1)
            if self.index.on_disk:
                self._fetch(every, entries)
            ids[asking], distances[asking] = _rank(queries[asking], every, count, entries, askers[asking])
            # A query that came away with too little, though as much as asked for was proposed, met mostly dead entries
            # or such that it must not find: it asks again.
            short = (ids[asking] == MISSING).any(1) & ((proposed != MISSING).sum(1) >= wanted)
            if not short.any() or proposed.shape[1] < wanted or wanted >= _MOST:
                return ids, distances
            asking, wanted = asking[short], 2 * wanted

    def _fetch(self, proposed: Int[np.ndarray, "n some"], entries: Entries) -> None:
        rows = entries.rows(np.unique(proposed))
        entries.prefetch(rows[rows >= 0])

    def _recent(self, queries, count: int, entries: Entries, askers: Askers, last: int) -> Int[np.ndarray, "n count"]:
        """The nearest of the entries before row `last` that the index does not have."""
        first = entries.first_row(self.upto)
        if first >= last:
            return np.zeros((len(queries), 0), np.int64)
        rows, _ = nearest(queries, _Rest(entries, first, last), count, self._in_parallel, askers)
        return np.where(rows == MISSING, MISSING, entries.ids(np.where(rows == MISSING, 0, rows + first)))

    def catch_up(self) -> bool:
        """Gives the index what was remembered since it was made, and takes from it what was forgotten.

        False if this kind of index takes nothing in: then it is to be built again when too much is searched beside it.
        """
        entries = self.memory.entries()
        end = len(entries)
        for start, stop in chunks(entries.first_row(self.upto), end, _BLOCK):
            if not self.index.add(entries.labels(start, stop), entries.keys(start, stop)):
                return False
        self.upto = max(self.upto, int(entries.ids(np.array(end - 1))) + 1 if end else 0)
        if len(gaps := entries.gaps(self.upto)):
            self.index.delete(gaps)
        return True


class _Judge:
    """A sample of entries and how far their true neighbours are: by it, searches are told how much they find."""

    def __init__(self, entries: Entries, count: int, seed: int, in_parallel: Map):
        rows = np.sort(np.random.default_rng(seed).choice(len(entries), min(_JUDGED, len(entries)), replace=False))
        self._own, self._queries, self._count = entries.ids(rows), entries.take(rows).astype(np.float32), count
        with bar("search a sample exactly", None):
            askers = _askers(entries, self._own, ONLY_ITSELF)
            _, self._true = nearest(self._queries, entries, count, in_parallel, askers)

    def recall(self, searcher: Searcher) -> float | None:
        """Share of the true neighbours that are found; None if there are none."""
        exist = np.isfinite(self._true)
        if not exist.any():
            return None
        _, found = searcher.search(self._queries, self._count, self._own)
        worst = np.where(exist, self._true, 0).max(1, keepdims=True)
        return float(((found <= worst * (1 + 1e-4) + 1e-6) & exist).sum() / exist.sum())


class _Rest:
    """The rows of a memory from `first` to `last`."""

    def __init__(self, entries: Entries, first: int, last: int):
        self._entries, self._first, self._last = entries, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def keys(self, start: int, stop: int) -> Float[np.ndarray, "rows width"]:
        return self._entries.keys(self._first + start, self._first + stop)

    def take(self, rows: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n width"]:
        return self._entries.take(self._first + rows)

    def labels(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        return self._entries.labels(self._first + start, self._first + stop)

    def documents(self, start: int, stop: int) -> Int[np.ndarray, "rows"]:
        return self._entries.documents(self._first + start, self._first + stop)


def _askers(entries: Entries, own: Int[np.ndarray, "n"], exclusion: Exclusion) -> Askers:
    documents = entries.live_documents.numbers_of(own)
    return Askers(own, np.where(documents == MISSING, STRANGER, documents), exclusion)


def _rank(queries, proposed: Int[np.ndarray, "n some"], count: int, entries: Entries, askers: Askers):
    """The `count` nearest of what was proposed, each once, without what is dead or must not be found."""
    proposed = np.sort(proposed, axis=1)
    rows = entries.rows(proposed)
    bad = rows < 0
    bad[:, 1:] |= proposed[:, 1:] == proposed[:, :-1]
    bad |= askers.forbid(np.arange(len(queries))[:, None], proposed, entries.live_documents.numbers_of(proposed))
    distances = np.full((len(queries), proposed.shape[1] + count), np.inf, np.float32)
    ids = np.full(distances.shape, MISSING, np.int64)
    ids[:, : proposed.shape[1]] = np.where(bad, MISSING, proposed)
    if proposed.size and len(entries):
        gaps = torch.from_numpy(entries.take(rows.clip(0))).float()  # much faster than by numpy
        gaps -= torch.from_numpy(queries)[:, None]
        distances[:, : proposed.shape[1]] = np.where(bad, np.inf, gaps.square_().sum(2).numpy())
    order = np.argsort(distances, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)


def make_searcher(
    memory: Memory, kind: Kind, directory: Path, recall: float, neighbours: int, seed: int, engine: Engine = LOCAL
) -> tuple[Searcher, Description]:
    """Builds an index of the memory, with as little effort as finds `recall` of the neighbours, and saves it."""
    entries = memory.entries()
    if not len(entries):
        raise InputError(f"{memory.directory} remembers nothing; add documents with `spalm remember`")
    directory.mkdir(parents=True, exist_ok=True)
    with only_writer(directory), workers(engine.requested_threads) as in_parallel:
        work = _work(directory, memory, seed)
        for folder in (work, memory.directory):
            engine.refuse_unless_shared(folder)
        try:
            index = build_index(kind, entries, seed, work, engine)
        except RuntimeError as error:
            raise OSError(errno.EIO, f"the index could not be made ({_last_line(error)})", str(directory)) from None
        upto = 0 if kind == "exact" else int(entries.ids(np.array(len(entries) - 1))) + 1
        searcher = Searcher(memory, index, upto, in_parallel)
        index.effort = 1
        judge = _Judge(entries, neighbours, seed, in_parallel)
        while (found := judge.recall(searcher)) is not None and found < recall:
            if index.effort >= index.most_effort:
                say(f"{kind}: a recall of {recall} is out of reach, {found:.3f} is what can be had")
                break
            index.effort = min(2 * index.effort, index.most_effort)
        described = Description(kind, memory.lineage(), upto, index.effort, found)
        _save(index, described, directory)
        shutil.rmtree(work)
    measured = "no recall to measure" if found is None else f"recall@{neighbours} {found:.3f}"
    say(f"{directory}: {kind} index of {len(entries):,} entries, {measured}")
    return Searcher(memory, index, upto), described


def _work(directory: Path, memory: Memory, seed: int) -> Path:
    """A folder for what is unfinished, that of another memory removed."""
    wanted = directory / f"work-{digest_of_json([memory.digest, seed])[:16]}"
    for other in directory.glob("work-*"):
        if other != wanted:
            shutil.rmtree(other)
    wanted.mkdir(exist_ok=True)
    return wanted.absolute()


def _save(index: Index, description: Description, directory: Path) -> None:
    (directory / DESCRIPTION).unlink(missing_ok=True)
    for leftover in FILES:
        path = directory / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    try:
        index.save(directory)
    except RuntimeError as error:
        raise OSError(errno.EIO, f"the index could not be written ({_last_line(error)})", str(directory)) from None
    write_json(directory / DESCRIPTION, asdict(description))


def _last_line(error: RuntimeError) -> str:
    """Returns the last line of a message of faiss: those before it name a place in its source."""
    return str(error).strip().splitlines()[-1]


def open_searcher(memory: Memory, directory: Path) -> tuple[Searcher, Description]:
    """The index at `directory`, for a memory with keys of the same kind, however that has changed since."""
    path = directory / DESCRIPTION
    if not path.exists():
        raise InputError(f"{directory} holds no index (no {DESCRIPTION}); make one with `spalm index`")
    try:
        described = Description(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise InputError(f"{path} is damaged; make the index again with `spalm index`") from None
    if described.lineage != memory.lineage()[: len(described.lineage)]:
        raise InputError(f"{directory} is an index of other keys than {memory.directory}'s; make it again")
    try:
        index = load_index(described.kind, directory)
    except (RuntimeError, ValueError, OSError, SafetensorError):
        raise InputError(f"{directory} is damaged; make the index again with `spalm index`") from None
    index.effort = described.effort
    return Searcher(memory, index, described.upto), described
