"""The contract between work that is divided into parts and the engine that runs the parts.

A job is an object that is called with a part and returns something small. It reads files and writes files, each in one
step, so doing a part twice is as good as doing it once. Other processes receive a job as its description; whatever it
opens or loads, it opens there, once for all parts that the process does.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

ProgressCallback = Callable[[int], None]
"""Receives the number of rows done since the last call; may end the work by raising an exception."""


@dataclass(frozen=True)
class JobPart:
    """Rows `first` to `last` - 1 of a job."""

    number: int
    """Place of the part among the parts of its job, from 0."""
    first: int
    """First row of the part."""
    last: int
    """Row after the last of the part."""

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def file_name(self) -> str:
        """Name of the file that holds the result, where the result is a file."""
        return f"{self.number:08d}"


def split_rows(first: int, last: int, size: int) -> list[JobPart]:
    """Returns the rows [first, last) as parts of at most `size` rows."""
    return [JobPart(number, begin, min(begin + size, last)) for number, begin in enumerate(range(first, last, size))]


def unfinished_parts(parts: list[JobPart], folder: Path) -> list[JobPart]:
    """Returns the parts that have no file in `folder` yet.

    The folder is listed instead of checking each file: once a network file system has reported a file as missing, it
    may go on doing so after another machine has made the file.
    """
    done = {path.name for path in folder.iterdir()}
    return [part for part in parts if part.file_name not in done]


class Job(Protocol):
    """Work that can be done part by part."""

    def __call__(self, part: JobPart, progress: ProgressCallback, /) -> Any:
        """Does one part and returns its result. It may report rows as they are done; the engine reports the rest."""


class Engine(Protocol):
    """Runs the parts of a job on the cores of one or several machines."""

    @property
    def cores(self) -> int:
        """Number of cores of the largest machine, and so of the parts that may share its memory."""
        ...

    @property
    def total_cores(self) -> int:
        """Cores of all machines together."""
        ...

    @property
    def machines(self) -> int:
        """Number of machines."""
        ...

    @property
    def requested_threads(self) -> int | None:
        """Threads that the user asked for; None: no number was given."""
        ...

    @property
    def threads(self) -> int:
        """Threads of a part that needs a whole machine, or the number that the user asked for."""
        ...

    @property
    def separate_processes(self) -> bool:
        """Whether each part that runs at the same time opens its files for itself instead of sharing them."""
        ...

    def run_parts(
        self,
        job: Job,
        parts: Iterable[JobPart],
        progress: ProgressCallback,
        *,
        threads: int,
        per_machine: int | None = None,
    ) -> Iterator[tuple[JobPart, Any]]:
        """Does all parts and yields each with its result when it is done, in any order.

        Each part uses `threads` threads. At most `per_machine` parts run at a time on one machine; None: as many as
        its cores allow.
        """
        ...

    def refuse_unless_shared(self, folder: Path) -> None:
        """Raises an error unless every machine sees what is written into `folder`."""

    def refuse_unless_visible(self, file: Path) -> None:
        """Raises an error unless every machine sees this text file with the same content."""


def in_order(results: Iterable[tuple[JobPart, Any]], next_number: int = 0) -> Iterator[tuple[JobPart, Any]]:
    """Yields results in the order of the parts' numbers, holding back those that come early."""
    early: dict[int, tuple[JobPart, Any]] = {}
    for part, result in results:
        early[part.number] = part, result
        while next_number in early:
            yield early.pop(next_number)
            next_number += 1


class SentByFields:
    """Base of dataclasses that are sent to other processes as their fields, without what they have opened or loaded."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        values = (getattr(self, field.name) for field in fields(self))  # pyright: ignore[reportArgumentType]
        return type(self), tuple(values)
