"""Documents, which have a name and a text in pieces, and sources, which have documents in three splits."""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from spalm.errors import InputError
from spalm.paths import user_path
from spalm.settings import Settings

Split = Literal["train", "dev", "test"]
"""Name of one of the three splits of a corpus."""
SPLITS: tuple[Split, ...] = ("train", "dev", "test")

PIECE_BYTES = 1 << 20
"""Approximate number of bytes in a piece of text."""


@dataclass(frozen=True)
class Document:
    """A named text in pieces of about a megabyte, so that a long text need not be in RAM as a whole."""

    name: str
    """Name under which the document is found in the corpus and in a memory."""
    pieces: Iterable[bytes]
    """The text. Each piece ends with a line, or after a space in a very long line."""


class TextSource(Settings):
    """A source of text. Subclasses add a `kind` and the way in which files become documents."""

    def files(self) -> list[tuple[str, Path]]:
        """Returns every file that is read, by name. Names and content decide whether a corpus is made again."""
        raise NotImplementedError

    def text_bytes(self) -> int | None:
        """Returns the approximate number of bytes of text; None if it is not known before the text is read."""
        paths = [path for _, path in self.files()]
        return None if any(path.suffix == ".gz" for path in paths) else sum(path.stat().st_size for path in paths)

    def documents(self, split: Split) -> Iterator[Document]:
        """Yields the documents of a split."""
        raise NotImplementedError

    def split_notice(self) -> str | None:
        """Returns a message about an unusual way of splitting, if there is one; raises an error if splitting fails."""
        return None


def locate(path: str) -> Path:
    """Returns the path that a user gave: as it is, or below the folder that SPALM_DATA names."""
    places = [user_path(path)]
    if os.environ.get("SPALM_DATA"):
        places.append(Path(os.environ["SPALM_DATA"]) / path)
    for place in places:
        if place.exists():
            return place
    looked = " nor ".join(dict.fromkeys(str(place) for place in places))
    raise InputError(
        f"there is no {looked}; give corpus.source.path=PATH, set SPALM_DATA to the folder that holds it, "
        "or fetch it with 'spalm download'"
    )


def open_text(path: Path) -> BinaryIO:
    """Opens a plain or gzipped file for reading its bytes."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # pyright: ignore[reportReturnType]


def lines_of(path: Path) -> Iterator[bytes]:
    """Yields the lines of a plain or gzipped file; one that is longer than a piece is cut after a space."""
    try:
        with open_text(path) as file:
            yield from _no_endless_lines(file)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path} is not a whole gzip file; fetch it again") from None


def _no_endless_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file; one that is longer than a piece is cut after a space."""
    held = b""
    while block := file.readline(PIECE_BYTES):
        held += block
        cut = len(held) if held.endswith(b"\n") or len(held) < PIECE_BYTES else held.rfind(b" ") + 1
        if cut:
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def in_pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields lines joined into pieces of about a megabyte."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def refuse_empty(path: Path) -> Path:
    """Returns the path of a file; raises an error if the file is empty."""
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty; give a file with text")
    return path
