"""The engine that needs nothing: threads of this process, which share what a job has opened."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import torch

from spalm.compute.engine import Job, Part, ProgressCallback


@dataclass(frozen=True)
class LocalEngine:
    given: int | None = None
    """Threads; default: as many as torch uses."""
    machines = 1
    own_processes = False

    @property
    def threads(self) -> int:
        return self.given or torch.get_num_threads()

    cores = slots = threads

    def each(
        self, job: Job, tasks: Iterable[Part], told: ProgressCallback, threads: int, at_once: int | None = None
    ) -> Iterator[tuple[Part, Any]]:
        """Parts that are not begun when one fails are not done."""
        at_once = at_once or max(1, self.cores // threads)
        if at_once == 1:  # in this thread, so that it can be interrupted at once
            for part in tasks:
                with computing_with(threads):
                    result = _do(job, part, told)
                yield part, result
            return
        count = torch.get_num_threads()
        with ThreadPoolExecutor(at_once, initializer=compute_with, initargs=(threads,)) as pool:
            waiting = {pool.submit(_do, job, part, told): part for part in tasks}
            try:
                for future in as_completed(waiting):
                    yield waiting[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)
                torch.set_num_threads(count)

    def refuse_unless_shared(self, folder: Path) -> None:
        """It is one machine."""

    def refuse_unless_seen(self, file: Path) -> None:
        """It is one machine."""


LOCAL = LocalEngine()


def _do(job: Job, part: Part, told: ProgressCallback) -> Any:
    left = len(part)

    def tell(rows: int) -> None:
        nonlocal left
        left -= rows
        told(rows)

    result = job(part, tell)
    if left:
        told(left)
    return result


def cores_here() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_with(threads: int) -> None:
    """Has arithmetic in this thread use so many."""
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    compute_with(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        faiss.omp_set_num_threads(before[1])
