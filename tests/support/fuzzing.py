"""Outcomes of hostile inputs: commands are tried in this process, and what goes wrong is counted by its kind."""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spalm.cli import entry
from support.fuzz_summary import COUNTED

PATIENCE = 60
"""Seconds after which a command hangs, on a busy machine too."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_OWN = (
    *("/dev/", "/proc/", sys.prefix, str(Path(entry.__file__).parents[1])),
    *(str(Path.home() / name) for name in (".cache", ".config/matplotlib")),
)
"""Where Python, numba and libraries write for themselves."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


class Hang(BaseException):
    """A command that does not end."""


class Tally:
    """Counts what was tried, and notes what went wrong."""

    def __init__(self, what: str):
        self.what, self.tried = what, 0
        self.problems: dict[str, list[str]] = {}
        self.slowest = (0.0, "")
        """Seconds of the input that took longest, and that input."""

    def note(self, kind: str, about: str) -> None:
        """Notes something that went wrong."""
        assert kind in COUNTED
        self.problems.setdefault(kind, []).append(about[:20_000])

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Counts an input, and notes if it takes too long or ends in an error that nobody expected."""
        self.tried += 1
        begun = time.monotonic()
        try:
            with _alarm():
                yield
        except Hang:
            self.note("hangs", f"{what}: no end after {PATIENCE} s\n{traceback.format_exc(limit=-6)}")
        except Exception:
            self.note("tracebacks", f"{what}\n{traceback.format_exc(limit=-6)}")
        self.slowest = max(self.slowest, (time.monotonic() - begun, what[:200]))

    def as_json(self) -> dict[str, Any]:
        """Returns what is sent to the process that writes the summary."""
        return {"what": self.what, "tried": self.tried, "problems": self.problems, "slowest": self.slowest}


class Commands:
    """Tries commands, each of which must end with an exit code and at most one line of error."""

    def __init__(self, tally: Tally, printed: pytest.CaptureFixture[str]):
        self.tally, self._printed = tally, printed

    def run(self, arguments: list[str], inside: Path, about: str = "") -> int | None:
        """Runs a command that may write in the folder `inside` alone; returns its exit code, None if there is none."""
        what = f"{about + ': ' if about else ''}spalm {' '.join(arguments)}"
        code = None
        self._printed.readouterr()  # what others printed
        with WRITES.outside(inside, Path.cwd()) as outside, self.tally.trying(what):
            code = entry.run(arguments)
        for path in outside:
            self.tally.note("outside", f"{what}: {path}")
        printed = self._printed.readouterr()
        if code is not None:
            self._check(code, printed.err, printed.out + printed.err, what)
        return code

    def _check(self, code: int, said: str, whole: str, what: str) -> None:
        """Notes an answer that is not in the form that is promised."""
        errors = [line for line in said.splitlines() if line.startswith("spalm: ")]
        if "Traceback" in said:
            self.tally.note("tracebacks", f"{what}\n{said}")
        elif code not in (0, 1, 2) or len(errors) != (code != 0) or errors != said.splitlines()[-1:][: len(errors)]:
            self.tally.note("other", f"{what}: exit code {code}\n{said}")
        elif _CONTROLS.search(whole):
            self.tally.note("other", f"{what}: control characters\n{whole!r}")


class _Writes:
    """Knows of every file that Python code of this process opens for writing, renames or removes."""

    def __init__(self) -> None:
        self._inside: tuple[str, ...] = ()
        self._found: list[str] | None = None
        self._installed = False

    @contextmanager
    def outside(self, *folders: Path) -> Iterator[list[str]]:
        """Collects the paths that are changed outside of some folders, and of those that libraries use."""
        if not self._installed:
            sys.addaudithook(self._hook)  # it cannot be taken away again
            self._installed = True
        self._inside = (*_OWN, *(str(folder.resolve()) for folder in folders))
        self._found = found = []
        try:
            yield found
        finally:
            self._found = None

    def _hook(self, event: str, arguments: tuple) -> None:
        if self._found is None or not _changes(event, arguments):
            return
        for path, folder in _paths(event, arguments):
            whole = os.path.join(f"/proc/self/fd/{folder}" if folder >= 0 else os.getcwd(), path)  # noqa: PTH109, PTH118
            real = os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))  # noqa: PTH118, PTH119, PTH120
            if not real.startswith(self._inside):
                self._found.append(f"{event} {real}")


def _changes(event: str, arguments: tuple) -> bool:
    """Returns whether an event changes a file."""
    if event == "open":
        return isinstance(arguments[0], str | bytes) and bool((arguments[2] or 0) & _WRITING)
    return event in _CHANGES


def _paths(event: str, arguments: tuple) -> list[tuple[str, int]]:
    """Returns the paths that an event changes, each with the open folder that it is relative to, or -1."""
    if event == "open" or event == "os.truncate":
        found = [(arguments[0], -1)]
    elif event in ("os.rename", "os.link"):
        found = [(arguments[0], arguments[2]), (arguments[1], arguments[3])]
    elif event == "os.symlink":
        found = [(arguments[1], arguments[2])]
    else:
        found = [(arguments[0], arguments[-1] if event != "os.chmod" else arguments[2])]
    return [(os.fsdecode(path), folder) for path, folder in found if isinstance(path, str | bytes)]


@contextmanager
def _alarm() -> Iterator[None]:
    """Interrupts what takes too long. What C code does without end is left to the limit of the whole run."""

    def interrupt(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


WRITES = _Writes()
