"""Output while something runs: one console for messages, and one style of progress bar."""

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
"""Console on standard error, for everything that is not a result."""
_SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two lines of progress where there is no terminal for a bar."""


def say(line: str) -> None:
    """Prints a line as it is: without markup, and without line breaks."""
    console.print(line, markup=False, soft_wrap=True)


class Bar:
    """A running progress bar."""

    def __init__(self, progress: Progress, task: TaskID):
        self._progress, self._task = progress, task
        self._spoke = time.monotonic()
        self.words = ""
        """Text behind the bar."""

    def advance(self, amount: float = 1) -> None:
        """Moves the bar."""
        self._progress.advance(self._task, amount)

    def say(self, words: str) -> None:
        """Changes the text behind the bar."""
        self.words = words
        self._progress.update(self._task, words=words)
        if not console.is_terminal and time.monotonic() - self._spoke > _SECONDS_BETWEEN_LINES:
            self._spoke = time.monotonic()
            task = self._progress.tasks[self._task]
            say(f"{task.description}: {task.completed:,.0f} of {task.total or 0:,.0f}, {words}")


@contextmanager
def bar(title: str, total: float | None, done: int = 0) -> Iterator[Bar]:
    """Shows a progress bar with an ETA on a terminal, and prints a line when it is done.

    `done` is the amount that an earlier, interrupted run had finished.
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
