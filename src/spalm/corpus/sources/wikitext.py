"""WikiText: three files of tokenised lines, in which a ` = Title = ` line begins an article."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from spalm.corpus.sources.text_source import (
    SPLITS,
    Document,
    Split,
    TextSource,
    in_pieces,
    lines_of,
    locate,
    refuse_empty,
)
from spalm.errors import InputError

_TITLE = re.compile(rb"^ = ([^=].*?) = \n?$")
"""Line with the title of an article; headings inside an article have more equals signs."""
_FILES: dict[Split, str] = {
    "train": "wiki.train.tokens",
    "dev": "wiki.valid.tokens",
    "test": "wiki.test.tokens",
}
"""Name of each split's file."""


class WikiText(TextSource):
    """WikiText, as it is published."""

    kind: Literal["wikitext"]
    """Name of this kind of source."""
    path: str
    """Folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens."""

    def _file(self, split: Split) -> Path:
        path = locate(self.path) / _FILES[split]
        if not path.exists():
            raise InputError(f"there is no {path}; a wikitext folder holds {', '.join(_FILES.values())}")
        return refuse_empty(path)

    def files(self) -> list[tuple[str, Path]]:
        """Returns the three files."""
        return [(split, self._file(split)) for split in SPLITS]

    def documents(self, split: Split) -> Iterator[Document]:
        """Yields the articles of a split."""
        lines = lines_of(self._file(split))
        return split_articles(lines, _TITLE, first_name=f"{split}: before the first title", between_blank_lines=True)


def split_articles(
    lines: Iterator[bytes], title: re.Pattern[bytes], first_name: str, *, between_blank_lines: bool = False
) -> Iterator[Document]:
    """Yields the documents of a stream of lines: each begins with a line that matches `title`, and group 1 names it.

    The text stays whole and in order: what stands before the first title is a document of its own if it has any words.
    """
    name, held = first_name, []
    for before, line, after in _with_neighbours(lines):
        found = title.search(line)
        if found and not (between_blank_lines and (before.strip() or after.strip())):
            if b"".join(held).strip():
                yield Document(name, list(in_pieces(held)))
                held = []
            name = (found[1] if title.groups else found[0]).decode("utf-8", "replace").strip()
        held.append(line)
    if held:
        yield Document(name, list(in_pieces(held)))


def _with_neighbours(lines: Iterable[bytes]) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yields each line between the line before it and the line after it; empty at both ends."""
    before, line = b"", None
    for after in chain(lines, [b""]):
        if line is not None:
            yield before, line, after
            before = line
        line = after
