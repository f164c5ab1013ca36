"""A memory that is changed without end until the process is killed, and what must be true of it afterwards."""

import os
import signal
from importlib import import_module
from pathlib import Path

import numpy as np

from spalm.memory import Memory, remember, source_of_text
from support.stub_memory import StubEncoder, stream

unpacking = import_module("spalm.maintenance.unpack")  # the package has a function of this name
ENCODER = StubEncoder()
MOST = 12
"""Number of documents from which on some are forgotten."""


def tokens_of(name: str) -> list[int]:
    """Returns the tokens of a document, which follow from its name."""
    random = np.random.default_rng(list(name.encode()))
    return random.integers(0, 50, random.integers(1, 60)).tolist()


def change_endlessly(arguments: list[str]) -> None:
    """Adds, forgets and compacts; writes a line before and after each change, as a server acknowledges it."""
    directory, journal, seed = Path(arguments[0]), Path(arguments[1]), arguments[2]
    random, memory = np.random.default_rng(int(seed)), Memory(directory)
    with journal.open("a") as log:
        for step in range(1_000_000):
            names = memory.entries().live_documents.names
            if len(names) > MOST:
                _change(log, "forget", random.choice(names, 4, replace=False).tolist(), memory)
                _change(log, "compact", [], memory)
            _change(log, "add", [f"{seed}-{step}-{number}" for number in range(3)], memory)


def _change(log, what: str, names: list[str], memory: Memory) -> None:
    """Makes a change, with a line before it and a line after it."""
    _write(log, f"begin {what} {' '.join(names)}")
    if what == "add":
        text = stream({name: tokens_of(name) for name in names})
        remember(memory, ENCODER, text, source=source_of_text(text))
    elif what == "forget":
        memory.forget(names)
    else:
        memory.compact()
    _write(log, f"end {what} {' '.join(names)}")


def _write(log, line: str) -> None:
    """Writes a line in one step, so that a kill leaves it whole or not at all."""
    os.write(log.fileno(), f"{line}\n".encode())


def problems_of(directory: Path, journal: Path) -> list[str]:
    """Returns what is wrong with a memory after a kill: damage, what was lost, and what came back."""
    wanted: set[str] = set()
    unsure: set[str] = set()
    for line in journal.read_text().splitlines():
        when, what, *names = line.split()
        unsure = {*names} if when == "begin" else set()
        if what != "compact":
            wanted = wanted | {*names} if when == "end" and what == "add" else wanted - {*names}
    memory = Memory(directory)
    memory.verify()
    entries = memory.entries()
    live = entries.live_documents
    found = {
        name: entries.take_tokens(entries.rows(np.arange(first, first + count))).tolist()
        for name, first, count in zip(live.names, live.first_ids.tolist(), live.entries.tolist())
    }
    lost = [f"{name} is lost" for name in wanted - unsure if name not in found]
    back = [f"{name} came back" for name in found if name not in wanted | unsure]
    wrong = [f"{name} has other tokens" for name, tokens in found.items() if tokens != tokens_of(name)]
    keys = entries.take(np.arange(len(entries)))
    shape = [] if keys.shape == (len(entries), memory.width) else [f"keys of shape {keys.shape}"]
    _settle(journal, {*found})
    return lost + back + wrong + shape


def _settle(journal: Path, held: set[str]) -> None:
    """Begins the journal again with what the memory holds."""
    journal.write_text(f"end add {' '.join(sorted(held))}\n" if held else "")


def unpack_and_die(arguments: list[str]) -> None:
    """Unpacks a file, and is killed when so many files are written, or with -1 just before the folder gets its name."""
    file, directory, left = Path(arguments[0]), Path(arguments[1]), [int(arguments[2])]
    extract, sync = unpacking._extract, unpacking.sync_to_disk

    def die_or_extract(*about) -> str:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return extract(*about)

    def die_or_sync(path: Path) -> None:
        if path.parent == directory.parent and left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    unpacking._extract, unpacking.sync_to_disk = die_or_extract, die_or_sync
    unpacking.unpack(file, directory)
