"""enwik8: one raw file of bytes, split by position; each `<page>` of the dump is a document."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from spalm.corpus.sources.text_source import Document, Split, TextSource, in_pieces, locate, refuse_empty
from spalm.errors import InputError

_FULL = 100_000_000
"""Number of bytes of the complete enwik8."""
_TITLE = re.compile(rb"<title>(.*?)</title>")


class Enwik8(TextSource):
    """The first bytes of a dump of Wikipedia."""

    kind: Literal["enwik8"]
    """Name of this kind of source."""
    path: str
    """Raw file: the full 100,000,000 bytes, or a prefix of them."""

    def _file(self) -> Path:
        path = locate(self.path)
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the raw enwik8 file itself")
        return refuse_empty(path)

    def files(self) -> list[tuple[str, Path]]:
        """Returns the only file of the corpus."""
        return [("enwik8", self._file())]

    def bounds(self) -> dict[Split, tuple[int, int]]:
        """Returns the bytes of each split: 90M / 5M / 5M of the full file, 90% / 5% / 5% of a prefix."""
        size = min(self._file().stat().st_size, _FULL)
        held_out = size // 20
        return {
            "train": (0, size - 2 * held_out),
            "dev": (size - 2 * held_out, size - held_out),
            "test": (size - held_out, size),
        }

    def documents(self, split: Split) -> Iterator[Document]:
        """Yields the pages of a split."""
        name, held = f"{split}: before the first page", []
        for line in _lines_between(self._file(), *self.bounds()[split]):
            if line.strip() == b"<page>" and held:
                yield Document(name, list(in_pieces(held)))
                held = []
            if title := _TITLE.search(line):
                name = title[1].decode("utf-8", "replace")
            held.append(line)
        if held:
            yield Document(name, list(in_pieces(held)))


def _lines_between(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yields the lines of the bytes [start, stop) of a file."""
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (line := file.readline(stop - start)):
            start += len(line)
            yield line
