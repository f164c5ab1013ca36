"""Everything that is printed: results, messages, and one style of progress bar.

Names and texts come from files that anybody may have made. What they hold of control characters is shown, not obeyed:
no terminal gets an escape sequence from them.
"""

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
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
from rich.segment import Segment

_CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff"
"""Characters that a terminal would obey, that change the direction of text, or that are half a character."""
_ANY_CONTROL, _ALL_BUT_LINES = re.compile(f"[{_CONTROLS}]"), re.compile(rf"(?![\n\t])[{_CONTROLS}]")


def visible(text: str, *, lines: bool = False) -> str:
    r"""Returns a text with its control characters as JSON writes them, such as \u001b; with `lines`, \n and \t stay."""
    return (_ALL_BUT_LINES if lines else _ANY_CONTROL).sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Console(RichConsole):
    """A console of rich that makes control characters visible in whatever it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of something to be printed."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text, lines=True), style, control)


console = Console(stderr=True, highlight=False)
"""Console on standard error, for everything that is not a result."""
_SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two lines of progress where there is no terminal for a bar."""


def say(line: str) -> None:
    """Prints a line to standard error as it is: without markup, and without line breaks."""
    console.print(visible(line), markup=False, emoji=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints a result as JSON."""
    print(visible(json.dumps(value, indent=2, ensure_ascii=False), lines=True))


def print_fields(*fields: object) -> None:
    """Prints a line of a list, its fields separated by tabs."""
    print(*(visible(str(field)) for field in fields), sep="\t")


def print_text(text: str) -> None:
    """Prints a part of a generated text at once: as it is into a file, made visible on a terminal."""
    print(visible(text, lines=True) if sys.stdout.isatty() else text, end="", flush=True)


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
            of = f" of {task.total:,.0f}" if task.total else ""
            say(f"{task.description}: {task.completed:,.0f}{of}, {text}")


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
        say(f"{title}: going on from {done:,}" + (f" of {total:,}" if total else ""))
    elif not console.is_terminal:
        say(f"{title} ...")
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        shown = Bar(progress, progress.add_task(title, total=total, completed=done, text=""))
        yield shown
    text = f": {shown.text}" if shown.text else ""
    say(f"{title}{text} ({time.monotonic() - began:.0f} s)")
