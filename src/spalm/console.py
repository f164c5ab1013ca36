"""What a person sees while something runs: one console, one style of progress bar."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True, highlight=False)


class Bar:
    """A running progress bar: `advance` moves it, `say` changes the words behind it."""

    def __init__(self, progress: Progress, task):
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def say(self, words: str) -> None:
        self._progress.update(self._task, words=words)


@contextmanager
def bar(title: str, total: float | None, done: float = 0) -> Iterator[Bar]:
    """A progress bar with an ETA; `done` is what an earlier, interrupted run had finished."""
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    ]
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task(title, total=total, completed=done, words=""))
