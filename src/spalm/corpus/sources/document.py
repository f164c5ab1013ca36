"""A document is a name and its text in pieces; a source is something that has documents in three splits."""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from spalm.errors import InputError
from spalm.settings import Settings

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")

PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """Text as bytes in pieces of about a megabyte, so that a long one need not be held whole."""

    name: str
    pieces: Iterable[bytes]


class TextSource(Settings):
    """Where text comes from. Subclasses add a `kind` and say how files become documents."""

    def files(self) -> list[tuple[str, Path]]:
        """Every file that is read, by name: names and content decide whether the corpus must be made again."""
        raise NotImplementedError

    def text_bytes(self) -> int | None:
        """About how much text there is in all splits, where that can be told without reading it."""
        paths = [path for _, path in self.files()]
        return None if any(path.suffix == ".gz" for path in paths) else sum(path.stat().st_size for path in paths)

    def documents(self, split: Split) -> Iterator[Document]:
        raise NotImplementedError


def locate(path: str) -> Path:
    """A path given by the user: as it is, or below the folder that SPALM_DATA names."""
    places = [Path(path).expanduser()]
    if os.environ.get("SPALM_DATA"):
        places.append(Path(os.environ["SPALM_DATA"]) / path)
    for place in places:
        if place.exists():
            return place
    looked = " nor ".join(str(place) for place in places)
    raise InputError(
        f"there is no {looked}; give corpus.source.path=PATH, set SPALM_DATA to the folder that holds it, "
        "or fetch it with 'spalm download'"
    )


def open_text(path: Path) -> BinaryIO:
    """The bytes of a plain or gzipped file."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def lines_of(path: Path) -> Iterator[bytes]:
    try:
        with open_text(path) as file:
            yield from _no_endless_lines(file)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path} is not a whole gzip file; fetch it again") from None


def _no_endless_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; one that is longer than a piece is cut after a blank."""
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
    """Lines joined into pieces of about a megabyte."""
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
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty; give a file with text")
    return path
