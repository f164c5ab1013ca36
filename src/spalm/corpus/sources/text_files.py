"""Your own text: files and folders of .txt, .md, .py and .jsonl; and text that every machine has, Python's library."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from spalm.corpus.sources.document import SPLITS, Document, Split, TextSource, in_pieces, lines_of, locate, refuse_empty
from spalm.corpus.sources.wikitext import articles
from spalm.errors import InputError

_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_NAMED: dict[str, Split] = {
    "train": "train",
    "valid": "dev",
    "validation": "dev",
    "dev": "dev",
    "test": "test",
}

Share = Annotated[float, Field(gt=0, lt=0.5)]


class _SplitByDocument(TextSource):
    """Whole documents go to one split each, chosen by a hash of their name: stable, whatever order files come in."""

    dev_share: Share = 0.05
    """Share of the bytes held out as dev; at least one document."""
    test_share: Share = 0.05
    """Share of the bytes held out as test; at least one document."""
    split_seed: int = 0
    """Another seed deals the documents out differently."""

    def all_documents(self) -> Iterator[Document]:
        raise NotImplementedError

    def documents(self, split: Split) -> Iterator[Document]:
        dealt = self._deal()
        return (document for index, document in enumerate(self.all_documents()) if dealt[index] == split)

    def _deal(self) -> list[Split]:
        sizes, keys = [], []
        for document in self.all_documents():
            sizes.append(sum(len(piece) for piece in document.pieces))
            keys.append(hashlib.sha256(f"{self.split_seed}/{document.name}".encode("utf-8", "replace")).digest())
        if len(sizes) < len(SPLITS):
            raise InputError(
                f"{len(sizes)} document(s) cannot be split into train, dev and test; add files, name them "
                "train.txt, valid.txt and test.txt, or set corpus.source.document_start to cut them"
            )
        total = sum(sizes)
        dealt: list[Split] = ["train"] * len(sizes)
        queue = sorted(range(len(sizes)), key=keys.__getitem__, reverse=True)
        for split, share, left_for_others in (("test", self.test_share, 2), ("dev", self.dev_share, 1)):
            taken = 0
            while not taken or (taken < share * total and len(queue) > left_for_others):
                index = queue.pop()
                if sizes[index] > share * total and len(queue) > left_for_others:
                    continue  # larger than its split is to be: it stays in train
                dealt[index] = split
                taken += max(sizes[index], 1)
        return dealt


class TextFiles(_SplitByDocument):
    kind: Literal["text"]
    path: str | list[str]
    """Files and folders (searched through) of .txt, .md, .py and .jsonl, plain or .gz. Files named train.*, valid.* (or
    dev.*) and test.* are the three splits; otherwise each document goes to one of them."""
    document_start: str | None = None
    """Regular expression for a line that begins a new document, its first group the name; without it a file is one
    document. A .jsonl file has a document a line, in its "text"; "name", "title" or "id" names it."""

    @field_validator("document_start")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern

    def _found(self) -> list[tuple[str, Path]]:
        """Every file with the name that its documents go by."""
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
        return [(name, refuse_empty(path)) for name, path in self._found()]

    def _named_splits(self) -> dict[Split, list[tuple[str, Path]]]:
        named: dict[Split, list[tuple[str, Path]]] = {}
        for name, path in self._found():
            if split := _NAMED.get(path.name.split(".")[0]):
                named.setdefault(split, []).append((name, path))
        return named if len(named) == len(SPLITS) else {}

    def all_documents(self) -> Iterator[Document]:
        for name, path in self._found():
            yield from self._documents_in(name, path)

    def documents(self, split: Split) -> Iterator[Document]:
        named = self._named_splits()
        if not named:
            return super().documents(split)
        return (document for name, path in named[split] for document in self._documents_in(name, path))

    def _documents_in(self, name: str, path: Path) -> Iterator[Document]:
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            yield from _documents_in_jsonl(name, path)
        elif self.document_start is not None:
            yield from articles(lines_of(path), re.compile(self.document_start.encode(), re.MULTILINE), name)
        else:
            yield Document(name, _Pieces(path))


class PythonStdlib(_SplitByDocument):
    kind: Literal["python-stdlib"]

    def files(self) -> list[tuple[str, Path]]:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = []
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted((path.relative_to(root).as_posix(), path) for path in found if path.stat().st_size)

    def all_documents(self) -> Iterator[Document]:
        return (Document(name, _Pieces(path)) for name, path in self.files())


class _Pieces:
    """The pieces of a file, read anew each time they are asked for."""

    def __init__(self, path: Path):
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        return in_pieces(lines_of(self._path))


def _is_text(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(_SUFFIXES)


def _documents_in_jsonl(name: str, path: Path) -> Iterator[Document]:
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
