"""Text files: files and folders of .txt, .md, .py and .jsonl, and a text that every machine has, Python's library."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from spalm.corpus.sources.positions import cut_document
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
from spalm.corpus.sources.wikitext import split_articles
from spalm.errors import InputError
from spalm.settings import Seed

_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
"""Ends of the names of files that are read from a folder."""
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
"""Folders in the standard library's folder that are left out."""
_NAMED: dict[str, Split] = {
    "train": "train",
    "valid": "dev",
    "validation": "dev",
    "dev": "dev",
    "test": "test",
}
"""Split that a file is for, by its name without endings."""

Share = Annotated[float, Field(gt=0, lt=0.5)]
"""Share of the text that is held out."""


class _SplitByDocument(TextSource):
    """Base of sources that put each document into one split, chosen by a hash of its name, not by the order of files.

    Where there are fewer documents than splits, each of them is cut by position instead.
    """

    dev_share: Share = 0.05
    """Share of the bytes held out as dev; at least one document."""
    test_share: Share = 0.05
    """Share of the bytes held out as test; at least one document."""
    split_seed: Seed = 0
    """Seed of the assignment of documents to splits."""

    def all_documents(self) -> Iterator[Document]:
        """Yields the documents of all splits."""
        raise NotImplementedError

    def documents(self, split: Split) -> Iterator[Document]:
        """Yields the documents of a split."""
        if few := self._few_documents():
            return iter(self._cut_by_position(few)[split])
        assigned = self._assign_splits()
        return (document for index, document in enumerate(self.all_documents()) if assigned[index] == split)

    def split_notice(self) -> str | None:
        """Returns a line about documents that are cut by position."""
        few = self._few_documents()
        if not few:
            return None
        cut = self._cut_by_position(few)["dev"]
        names = " and ".join(document.name.removesuffix(" (dev)") for document in cut)
        shares = (
            f"{1 - self.dev_share - self.test_share:.0%} train, {self.dev_share:.0%} dev, {self.test_share:.0%} test"
        )
        return f"{len(few)} document(s) are too few to split by document: {names} cut by position into {shares}"

    def _few_documents(self) -> list[Document]:
        """Returns all documents where they are fewer than the splits, otherwise none."""
        first = list(islice(self.all_documents(), len(SPLITS)))
        return first if len(first) < len(SPLITS) else []

    def _cut_by_position(self, documents: list[Document]) -> dict[Split, list[Document]]:
        """Returns the parts of each document; one that is too small to be cut goes to train whole."""
        shares: dict[Split, float] = {"dev": self.dev_share, "test": self.test_share}
        parts = [cut_document(document, shares) or {"train": document} for document in documents]
        splits: dict[Split, list[Document]] = {
            split: [each[split] for each in parts if split in each] for split in SPLITS
        }
        if not splits["dev"]:
            names = " and ".join(document.name for document in documents)
            raise InputError(
                f"{names} cannot be split into train, dev and test: too few lines to cut it by position; give more "
                "text, or files named train.txt, valid.txt and test.txt"
            )
        return splits

    def _assign_splits(self) -> list[Split]:
        """Returns the split of each document."""
        sizes, keys = [], []
        for document in self.all_documents():
            sizes.append(sum(len(piece) for piece in document.pieces))
            keys.append(hashlib.sha256(f"{self.split_seed}/{document.name}".encode("utf-8", "replace")).digest())
        if not sizes:
            raise InputError("there are no documents to split into train, dev and test; give corpus.source.path")
        total = sum(sizes)
        assigned: list[Split] = ["train"] * len(sizes)
        queue = sorted(range(len(sizes)), key=keys.__getitem__, reverse=True)
        held_out: list[tuple[Split, float, int]] = [("test", self.test_share, 2), ("dev", self.dev_share, 1)]
        for split, share, left_for_others in held_out:
            taken = 0
            while not taken or (taken < share * total and len(queue) > left_for_others):
                index = queue.pop()
                if sizes[index] > share * total and len(queue) > left_for_others:
                    continue  # larger than its split is to be: it stays in train
                assigned[index] = split
                taken += max(sizes[index], 1)
        return assigned


class TextFiles(_SplitByDocument):
    """Files of text."""

    kind: Literal["text"]
    """Name of this kind of source."""
    path: str | list[str]
    """Files, and folders that are searched for .txt, .md, .py and .jsonl, plain or .gz. Files named train.*, valid.*
    (or dev.*) and test.* are the three splits; otherwise each document goes to one of them. One or two documents are
    cut by position instead."""
    document_start: str | None = None
    """Regular expression for a line that begins a new document, its first group the name; without it a file is one
    document. A .jsonl file has one document in each line, in its "text"; "name", "title" or "id" names it."""

    @field_validator("document_start")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        """Raises an error unless the pattern is a regular expression."""
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern

    def _found(self) -> list[tuple[str, Path]]:
        """Returns every file that is read, with the name that its documents get."""
        found = []
        for given in [self.path] if isinstance(self.path, str) else self.path:
            place = locate(given)
            if place.is_file():
                found.append((place.name, place))
            else:
                inside = sorted(path for path in place.rglob("*") if path.is_file() and _is_text(path))
                found += [(path.relative_to(place).as_posix(), path) for path in inside]
        if not found:
            raise InputError(
                f"{self.path} holds no {', '.join(_SUFFIXES)} files (or .gz of them); give corpus.source.path"
            )
        return found

    def files(self) -> list[tuple[str, Path]]:
        """Returns every file that is read, by name; refuses empty ones."""
        return [(name, refuse_empty(path)) for name, path in self._found()]

    def _named_splits(self) -> dict[Split, list[tuple[str, Path]]]:
        """Returns the files named after each split; an empty dictionary unless there are files for all three."""
        named: dict[Split, list[tuple[str, Path]]] = {}
        for name, path in self._found():
            if split := _NAMED.get(path.name.split(".")[0]):
                named.setdefault(split, []).append((name, path))
        return named if len(named) == len(SPLITS) else {}

    def all_documents(self) -> Iterator[Document]:
        """Yields the documents of all files."""
        for name, path in self._found():
            yield from self._documents_in(name, path)

    def documents(self, split: Split) -> Iterator[Document]:
        """Yields the documents of a split."""
        named = self._named_splits()
        if not named:
            return super().documents(split)
        return (document for name, path in named[split] for document in self._documents_in(name, path))

    def split_notice(self) -> str | None:
        """Returns a line about documents that are cut by position."""
        return None if self._named_splits() else super().split_notice()

    def _documents_in(self, name: str, path: Path) -> Iterator[Document]:
        """Yields the documents of one file."""
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            yield from _documents_in_jsonl(name, path)
        elif self.document_start is not None:
            yield from split_articles(lines_of(path), re.compile(self.document_start.encode(), re.MULTILINE), name)
        else:
            yield Document(name, _Pieces(path))


class PythonStdlib(_SplitByDocument):
    """The standard library of the running Python, without its tests."""

    kind: Literal["python-stdlib"]
    """Name of this kind of source."""

    def files(self) -> list[tuple[str, Path]]:
        """Returns the library's files, by name."""
        root = Path(sysconfig.get_paths()["stdlib"])
        found = []
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted((path.relative_to(root).as_posix(), path) for path in found if path.stat().st_size)

    def all_documents(self) -> Iterator[Document]:
        """Yields each of the library's files as a document."""
        return (Document(name, _Pieces(path)) for name, path in self.files())


class _Pieces:
    """The pieces of a file, which is read anew in each iteration."""

    def __init__(self, path: Path):
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        return in_pieces(lines_of(self._path))


def _is_text(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(_SUFFIXES)


def _documents_in_jsonl(name: str, path: Path) -> Iterator[Document]:
    """Yields a document for every line of a .jsonl file."""
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["text"]
            own_name = next((str(record[key]) for key in ("name", "title", "id") if key in record), str(number))
            yield Document(f"{name}/{own_name}", [text.rstrip("\n").encode() + b"\n"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                f'{path}, line {number}: not a JSON object with a "text"; mend or remove the line'
            ) from None
