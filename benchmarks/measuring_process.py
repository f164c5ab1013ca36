"""A process in which set-ups are measured one after another, so that one that takes too long can be stopped.

The parent says what to measure and waits for what comes; when too much time has passed since the last message, or the
process has ended (out of memory, a crash of a library), it begins another one. Everybody is measured in such a process.
"""

import spalm  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import math
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import faiss
import numpy as np

import knn_peers
import peers
from peers import Truth, timed

_START = 900.0
"""Seconds for beginning a process, reading the vectors, and compiling: not part of what is measured."""


class NotMeasured(Exception):
    """Why a set-up, or the rest of it, was not measured."""


@dataclass(frozen=True)
class Subject:
    """What all measurements of a set of vectors have in common."""

    path: Path
    """File of the vectors, float32."""
    k: int
    """Number of neighbours."""
    truth: Truth
    """Queries by which recall is measured."""
    targets: list[float]
    """Recalls at which systems are compared."""


@dataclass
class MeasuringProcess:
    """The process, which is begun when it is needed."""

    subject: Subject
    _process: Any = field(default=None, init=False)
    _pipe: Any = field(default=None, init=False)

    def ours(self, aim: float) -> tuple[float, float]:
        """Returns the recall and the seconds of our graph, made with this aim."""
        (answer,) = self._answers(("ours", aim), math.inf)
        return answer

    def peer(self, system: str, name: str, longest: float) -> Iterator[tuple[float, float, str]]:
        """Yields what `peers.measure` does; raises NotMeasured if building or a search takes longer than `longest`."""
        yield from self._answers((system, name, longest), longest)

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = self._pipe = None

    def _answers(self, order: tuple, longest: float) -> Iterator[Any]:
        """Sends an order, and yields its answers."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(self.subject, other), daemon=True)
            self._process.start()
            other.close()
        self._pipe.send(order)
        stage, limit = "beginning", _START
        while True:
            seconds = None if math.isinf(limit) else max(0.0, limit)
            if not self._pipe.poll(seconds):
                self.stop()
                raise NotMeasured(f"stopped: {stage} took more than {limit:.0f} s")
            try:
                kind, value = self._pipe.recv()
            except (EOFError, OSError):
                code = (self._process.join(), self._process.exitcode)[1]
                self.stop()
                raise NotMeasured(f"failed: the process ended while {stage}, exit code {code}") from None
            if kind == "stage":
                stage, limit = value, longest
            elif kind == "answer":
                yield value
            elif kind == "failed":
                raise NotMeasured(f"failed while {stage}: {value}")
            else:
                return


def _serve(subject: Subject, pipe: Connection) -> None:
    """Carries out orders until the parent ends."""
    faiss.omp_set_num_threads(knn_peers.THREADS)
    keys = np.load(subject.path)
    _warm_ours(keys, subject.k)
    candidates = knn_peers.candidates(keys, subject.k)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        try:
            answers = _ours(order, keys, subject) if order[0] == "ours" else _peer(order, candidates, keys, subject)
            for answer in answers:
                pipe.send(answer)
            pipe.send(("done", None))
        except Exception as error:  # whatever a library raises is told, and the next one is measured
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _ours(order: tuple, keys: np.ndarray, subject: Subject) -> Iterator[tuple[str, Any]]:
    yield "stage", "joining"
    seconds, graph = timed(lambda: spalm.knn_graph(keys, subject.k, recall=order[1], ram=8 << 30))
    yield "answer", (subject.truth.recall(keys, graph.indices[subject.truth.rows]), seconds)


def _peer(order: tuple, candidates: Iterator, keys: np.ndarray, subject: Subject) -> Iterator[tuple[str, Any]]:
    # They come in one order, for everybody: what set-ups share is built once, and freed after the last of them.
    candidate = next(each for each in candidates if (each.system, each.name) == order[:2])
    if candidate.warm is not None:
        candidate.warm()
    yield "stage", "building"
    set_up = candidate.build()
    yield "stage", "searching"
    for measured in peers.measure(set_up, keys, subject.truth, subject.targets, longest=order[2]):
        yield "answer", measured
        yield "stage", "searching"


def _warm_ours(keys: np.ndarray, k: int) -> None:
    """Has our loops compiled, or read from numba's cache, as those of pynndescent are before it is measured."""
    few = np.random.default_rng(0).standard_normal((5000, keys.shape[1]), np.float32)
    spalm.knn_graph(few, k, ram=8 << 30)
