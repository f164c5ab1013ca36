"""What a person sees while something runs: one console, one style of progress bar."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True, highlight=False)
_SECONDS_BETWEEN_LINES = 30.0
"""Where there is no terminal for a bar, how often a line says how far it is."""


def say(line: str) -> None:
    """A line as it is: text of a user's is never taken for markup, and never broken."""
    console.print(line, markup=False, soft_wrap=True)


class Bar:
    """A running progress bar: `advance` moves it, `say` changes the words behind it."""

    def __init__(self, progress: Progress, task: TaskID):
        self._progress, self._task = progress, task
        self._spoke = time.monotonic()
        self.words = ""

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def say(self, words: str) -> None:
        self.words = words
        self._progress.update(self._task, words=words)
        if not console.is_terminal and time.monotonic() - self._spoke > _SECONDS_BETWEEN_LINES:
            self._spoke = time.monotonic()
            task = self._progress.tasks[self._task]
            say(f"{task.description}: {task.completed:,.0f} of {task.total or 0:,.0f}, {words}")


@contextmanager
def bar(title: str, total: float | None, done: float = 0) -> Iterator[Bar]:
    """A progress bar with an ETA while it runs on a terminal, and a line that stays when it is done.

    `done` is what an earlier, interrupted run had finished.
    """
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    ]
    if done:
        say(f"{title}: going on from {done:,} of {total or 0:,}")
    elif not console.is_terminal:
        say(f"{title} ...")
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        shown = Bar(progress, progress.add_task(title, total=total, completed=done, words=""))
        yield shown
    words = f": {shown.words}" if shown.words else ""
    say(f"{title}{words} ({time.monotonic() - began:.0f} s)")
