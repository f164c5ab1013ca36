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
        self._last_line_at = time.monotonic()
        self.text = ""
        """Text shown after the bar."""

    def advance(self, amount: float = 1) -> None:
        """Moves the bar on by `amount`."""
        self._progress.advance(self._task, amount)

    def say(self, text: str) -> None:
        """Changes the text after the bar. Without a terminal, prints it as a line if the last one was long ago."""
        self.text = text
        self._progress.update(self._task, text=text)
        if not console.is_terminal and time.monotonic() - self._last_line_at > _SECONDS_BETWEEN_LINES:
            self._last_line_at = time.monotonic()
            task = self._progress.tasks[self._task]
            say(f"{task.description}: {task.completed:,.0f} of {task.total or 0:,.0f}, {text}")


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
        TextColumn("{task.fields[text]}", markup=False),
    ]
    if done:
        say(f"{title}: going on from {done:,} of {total or 0:,}")
    elif not console.is_terminal:
        say(f"{title} ...")
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        shown = Bar(progress, progress.add_task(title, total=total, completed=done, text=""))
        yield shown
    text = f": {shown.text}" if shown.text else ""
    say(f"{title}{text} ({time.monotonic() - began:.0f} s)")
