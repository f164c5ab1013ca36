"""Tracing of texts: which spans stand word for word in a memory, and in which documents."""

import os
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spalm.artifact import MANIFEST, UNFINISHED
from spalm.corpus import Corpus, Tokeniser
from spalm.errors import InputError
from spalm.memory import Entries, EntrySource, Memory, is_memory
from spalm.memory.exact import LEAST, VerbatimSpan

MEMORY_FOLDER, CORPUS_FOLDER = "memory", "corpus"
"""Folders of a run and of an attached model."""
_SHOWN = 160
"""Number of characters of a span that are shown in a table."""


@dataclass(frozen=True)
class TracedSpan:
    """A part of a text that stands word for word in the memory, and is part of no longer one."""

    text: str
    start: int
    """First character of the span in the traced text."""
    end: int
    """Character after the last of the span."""
    tokens: int
    """Number of tokens of the span."""
    count: int
    """Number of places where the span stands in the memory."""
    sources: list[EntrySource]
    """Some of these places: documents, and the tokens in them at which the span begins."""


def trace_text(text: str, tokeniser: Tokeniser, memory: Memory, *, least: int = LEAST) -> list[TracedSpan]:
    """Returns the spans of a text that stand word for word in a memory, longest first; see `Model.trace`."""
    if least < 1:
        raise InputError(f"least = {least}: a span has at least 1 token")
    try:
        tokens, offsets = tokeniser.encode_with_offsets(text)
    except UnicodeEncodeError as error:
        raise InputError(f"the text is no Unicode (sign {error.start}); give it as UTF-8") from None
    entries, found = memory.entries(), []
    for span in memory.exact.current().trace(tokens, least):
        start, end = int(offsets[span.start, 0]), int(offsets[span.end - 1, 1])
        found.append(TracedSpan(text[start:end], start, end, len(span), span.count, sources_of(span, entries)))
    return found


def sources_of(span: VerbatimSpan, entries: Entries) -> list[EntrySource]:
    """Returns some places where a span stands, without those that were forgotten since it was found."""
    sources = [entries.source(int(id)) for id in span.ids]
    return [source for source in sources if source is not None]


@dataclass(frozen=True)
class Traceable:
    """A memory, and the tokeniser of its tokens: all that tracing needs."""

    memory: Memory
    tokeniser: Tokeniser

    def trace(self, text: str, *, least: int = LEAST) -> list[TracedSpan]:
        """Returns the spans of a text that stand word for word in the memory, longest first; see `Model.trace`."""
        return trace_text(text, self.tokeniser, self.memory, least=least)


def open_traceable(directory: Path) -> Traceable:
    """Opens the memory of an attached model or a run, or the folder of that memory itself; no network is loaded."""
    around = folder_around(directory)
    inside = (around or directory) / MEMORY_FOLDER
    memory = Memory(inside if is_memory(inside) else directory)
    corpus = (around or memory.directory.parent) / CORPUS_FOLDER
    if not (corpus / MANIFEST).is_file():
        raise InputError(
            f"{directory}: the tokeniser of this memory is not known (no {corpus}); give the folder of a run, or what "
            "`spalm attach` made"
        )
    tokeniser = Corpus(corpus).tokeniser
    if tokeniser.size != memory.vocabulary:
        raise InputError(
            f"{corpus} has {tokeniser.size:,} tokens in its vocabulary, {memory.directory} has {memory.vocabulary:,}; "
            "give the folder of the run that the memory belongs to"
        )
    return Traceable(memory, tokeniser)


def folder_around(directory: Path) -> Path | None:
    """Returns the folder of the run or attached model that a folder is, or whose memory it is; None if there is none.

    It is looked for where the path says that the memory is, then where links lead: the memory of a run may be a link to
    another disk.
    """
    if is_memory(directory / MEMORY_FOLDER):
        return directory if _has_corpus(directory) else None
    for given in (Path(os.path.abspath(directory)), directory.resolve()):  # noqa: PTH100 - links are not followed
        if given.name == MEMORY_FOLDER and _has_corpus(given.parent):
            return given.parent
    return None


def _has_corpus(directory: Path) -> bool:
    """Returns whether a folder holds a corpus, finished or not: it is that of a run or an attached model."""
    return any((directory / CORPUS_FOLDER / name).is_file() for name in (MANIFEST, UNFINISHED))


def text_of_file(path: Path) -> str:
    """Returns the text of a file, with the line ends that it has; refuses what is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start:,}); convert it first") from None


def print_spans(text: str, spans: list[TracedSpan], console: Console) -> None:
    """Prints traced spans as a table, and how much of the text they cover."""
    if not spans:
        console.print("no span of this text stands word for word in the memory; --least N looks for shorter ones")
        return
    table = Table("tokens", "characters", "span", "places", "documents and tokens in them", box=box.SIMPLE_HEAD)
    table.columns[4].overflow = "fold"
    for number in (0, 3):
        table.columns[number].justify = "right"
    for span in spans:
        named = "\n".join(f"{source.document}, token {source.offset:,}" for source in span.sources)
        place = f"{span.start:,} to {span.end - 1:,}"
        table.add_row(f"{span.tokens:,}", place, Text(_shortened(span.text)), f"{span.count:,}", Text(named))
    console.print(table)
    share = covered_characters(spans) / len(text)
    console.print(f"{len(spans):,} span(s); {share:.1%} of the characters stand word for word in the memory")


def covered_characters(spans: list[TracedSpan]) -> int:
    """Returns the number of characters that are in at least one span."""
    covered = last = 0
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0, span.end - max(last, span.start))
        last = max(last, span.end)
    return covered


def _shortened(text: str) -> str:
    """Returns a text on one line, its middle left out if it is long."""
    line = " ".join(text.split())
    half = _SHOWN // 2
    return line if len(line) <= _SHOWN else f"{line[:half]} … {line[-half:]}"
