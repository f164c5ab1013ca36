"""WMT's news crawl, one article in each line: `YYYYMMDD <tab> base64(text) [<tab> base64(unsplit)]`."""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from spalm.corpus.sources.text_source import Document, Split, TextSource, lines_of, locate, refuse_empty
from spalm.errors import InputError

_MONTHS: dict[Split, range] = {"train": range(1, 11), "dev": range(11, 12), "test": range(12, 13)}
"""Months whose articles each split is made of."""
_TOKENS_PER_WORD = 1.25
"""Tokens of a 50k byte-level BPE for each word of English news. Only the size of the sample depends on it."""


class WmtNews(TextSource):
    """News articles with their dates."""

    kind: Literal["wmt-news"]
    """Name of this kind of source."""
    path: str
    """File, or folder of files, of dated documents (news-docs.YEAR.en.filtered.gz), plain or gzipped."""
    sample_tokens: int = Field(default=1_000_000, gt=0)
    """Approximate number of tokens of dev and of test: every n-th article of November and December, by date."""

    def files(self) -> list[tuple[str, Path]]:
        """Returns the file, or the files of the folder."""
        path = locate(self.path)
        found = [path] if path.is_file() else sorted(item for item in path.iterdir() if item.is_file())
        if not found:
            raise InputError(f"{path} holds no files; put news-docs.YEAR.en.filtered.gz there")
        return [(item.name, refuse_empty(item)) for item in found]

    def text_bytes(self) -> int | None:
        """Returns None: the text is in base64, and sampled."""
        return None

    def documents(self, split: Split) -> Iterator[Document]:
        """Yields the articles of January to October, or a sample of November or December, spread over the dates."""
        if split == "train":
            return (_document(*article) for article in self._articles(split))
        articles = sorted((where.date, order, words) for order, (where, words) in enumerate(self._sizes(split)))
        wanted = self.sample_tokens / _TOKENS_PER_WORD
        step = max(1.0, sum(words for _, _, words in articles) / wanted)
        kept = {articles[int(index * step)][1] for index in range(int(len(articles) / step))} if articles else set()
        chosen = [article for order, article in enumerate(self._articles(split)) if order in kept]
        return (_document(*article) for article in sorted(chosen, key=lambda article: article[0].date))

    def _sizes(self, split: Split) -> Iterator[tuple["_Place", int]]:
        """Yields the place of each article of a split and its number of words."""
        return ((where, len(text.split())) for where, text in self._articles(split))

    def _articles(self, split: Split) -> Iterator[tuple["_Place", bytes]]:
        """Yields the place of each article of a split and its text."""
        for _, path in self.files():
            for number, line in enumerate(lines_of(path), 1):
                where = _Place(path, number, line[:8])
                if where.month in _MONTHS[split]:
                    yield where, where.text(line)


class _Place:
    """File, line and date of an article."""

    def __init__(self, path: Path, number: int, date: bytes):
        self.path, self.number, self.date = path, number, date
        if not (date.isdigit() and len(date) == 8 and 1 <= int(date[4:6]) <= 12):
            raise self._problem(f"begins with {date!r}, not with a date such as 20191231")
        self.month = int(date[4:6])

    def text(self, line: bytes) -> bytes:
        """Returns the text of the article's line."""
        fields = line.rstrip(b"\r\n").split(b"\t")
        try:
            return base64.b64decode(fields[1], validate=True)
        except (IndexError, binascii.Error):
            raise self._problem("has no base64 text after the date and a tab") from None

    def _problem(self, reason: str) -> InputError:
        return InputError(f"{self.path}, line {self.number}: {reason}; wmt-news reads WMT's news-docs files")


def _document(where: _Place, text: bytes) -> Document:
    """Returns an article as a document that is named by its date and line."""
    date = where.date.decode()
    return Document(f"{date[:4]}-{date[4:6]}-{date[6:]}/{where.number}", [text.rstrip(b"\n") + b"\n"])
