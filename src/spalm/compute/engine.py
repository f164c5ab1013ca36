"""What an engine is given and gives back.

A job is what its parts have in common: an object that is called with a part and returns something small. It reads files
and writes files, each in one step, so a part that is done twice is as good as done once. To other processes a job
travels as a description; what it opens or loads, it opens there, once for all parts that this process does.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

ProgressCallback = Callable[[int], None]
"""Is told how many rows more are done; ends the work by raising something."""


@dataclass(frozen=True)
class Part:
    """Rows `first` to `last` - 1, the part of a job with this number."""

    number: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def file(self) -> str:
        """The name of what is made of it, where that is a file."""
        return f"{self.number:08d}"


def parts(first: int, last: int, size: int) -> list[Part]:
    """[first, last) in parts of at most `size` rows."""
    return [Part(number, begin, min(begin + size, last)) for number, begin in enumerate(range(first, last, size))]


def undone(everything: list[Part], folder: Path) -> list[Part]:
    """The parts of which there is no file in `folder`.

    It is listed, not asked for each of them: to a network's file system, a file that was asked for in vain may be
    missing for a while after another machine has made it.
    """
    done = {path.name for path in folder.iterdir()}
    return [part for part in everything if part.file not in done]


class Job(Protocol):
    def __call__(self, part: Part, told: ProgressCallback) -> Any:
        """`told` may be told of rows on the way; of those that it was not, it is told at the end."""


class Engine(Protocol):
    cores: int
    """Of one machine, the largest: so many tasks may share its memory."""
    slots: int
    """Of all machines together."""
    machines: int
    given: int | None
    """Threads that the user asked for."""
    threads: int
    """With which a part computes that needs all of a machine, or what the user gave it."""
    own_processes: bool
    """Whether what parts of a job open is opened for each of them, or shared by those of a machine."""

    def each(
        self, job: Job, tasks: Iterable[Part], told: ProgressCallback, threads: int, at_once: int | None = None
    ) -> Iterator[tuple[Part, Any]]:
        """Does all parts and yields each with its result when it is done, in any order.

        Each with so many threads, at most `at_once` of them at a time on one machine; default: as many as have room.
        """

    def refuse_unless_shared(self, folder: Path) -> None:
        """Complains unless every machine sees what is written into `folder`."""

    def refuse_unless_seen(self, file: Path) -> None:
        """Complains unless every machine sees this file, of text, as it is here."""


def in_order(done: Iterable[tuple[Part, Any]], next_number: int = 0) -> Iterator[tuple[Part, Any]]:
    """The same in the order of the parts' numbers: those that come early are held back."""
    early: dict[int, tuple[Part, Any]] = {}
    for part, result in done:
        early[part.number] = part, result
        while next_number in early:
            yield early.pop(next_number)
            next_number += 1


class SentByFields:
    """A dataclass that goes to another process as its fields alone, without what it has opened or loaded since."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
