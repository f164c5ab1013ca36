"""The engine of one machine: threads of this process, which share what a job has opened."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spalm.compute.engine import Job, JobPart, ProgressCallback
from spalm.compute.threads import set_threads, using_threads


@dataclass(frozen=True)
class LocalEngine:
    """Runs the parts of a job in threads of this process."""

    requested_threads: int | None = None
    """Threads that the user asked for; None: as many as torch uses."""
    machines = 1
    separate_processes = False

    @property
    def threads(self) -> int:
        """Threads that all parts together use."""
        return self.requested_threads or torch.get_num_threads()

    cores = total_cores = threads

    def run_parts(
        self,
        job: Job,
        parts: Iterable[JobPart],
        progress: ProgressCallback,
        *,
        threads: int,
        per_machine: int | None = None,
    ) -> Iterator[tuple[JobPart, Any]]:
        """Does all parts; when one fails, those that have not begun are not done."""
        workers = per_machine or max(1, self.cores // threads)
        if workers == 1:  # in this thread, so that it can be interrupted at once
            for part in parts:
                with using_threads(threads):
                    result = _run_part(job, part, progress)
                yield part, result
            return
        count = torch.get_num_threads()
        with ThreadPoolExecutor(workers, initializer=set_threads, initargs=(threads,)) as pool:
            running = {pool.submit(_run_part, job, part, progress): part for part in parts}
            try:
                for future in as_completed(running):
                    yield running[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)
                torch.set_num_threads(count)

    def refuse_unless_shared(self, folder: Path) -> None:
        """Accepts every folder: there is only one machine."""

    def refuse_unless_visible(self, file: Path) -> None:
        """Accepts every file: there is only one machine."""


LOCAL = LocalEngine()
"""The engine of this machine with as many threads as torch uses."""


def _run_part(job: Job, part: JobPart, progress: ProgressCallback) -> Any:
    """Does a part, and reports those of its rows that the job did not report itself."""
    left = len(part)

    def report(rows: int) -> None:
        nonlocal left
        left -= rows
        progress(rows)

    result = job(part, report)
    if left:
        progress(left)
    return result
