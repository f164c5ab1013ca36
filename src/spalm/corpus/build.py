"""The corpus stage: text to token arrays, in bounded memory. A killed build resumes where it was."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from pydantic import Field

from spalm import artifact
from spalm.artifact import Stage
from spalm.console import Bar, bar, say
from spalm.corpus.sources.enwik8 import Enwik8
from spalm.corpus.sources.text_files import PythonStdlib, TextFiles
from spalm.corpus.sources.text_source import PIECE_BYTES, SPLITS, Document, Split
from spalm.corpus.sources.wikitext import WikiText
from spalm.corpus.sources.wmt_news import WmtNews
from spalm.corpus.tokeniser import ByteTokeniser, Tokeniser, TokeniserSettings, learn_tokeniser, read_tokeniser
from spalm.corpus.tokens import CORPUS_KIND, CORPUS_VERSION, Corpus, TokenStream, token_dtype
from spalm.digests import digest_of_file, digest_of_json
from spalm.errors import InputError
from spalm.files import read_json, write_atomically, write_json
from spalm.paths import resolved_path
from spalm.settings import Settings

_BATCH_BYTES = 4 * PIECE_BYTES
"""Bytes of text that the tokeniser is given at a time."""
_SAVE_SECONDS = 5.0
"""Seconds between two entries of the journal."""


class CorpusSettings(Settings):
    """Text and tokeniser of a corpus."""

    source: Annotated[WikiText | Enwik8 | WmtNews | TextFiles | PythonStdlib, Field(discriminator="kind")]
    """Where the text comes from: kind (wikitext, enwik8, wmt-news, text, python-stdlib) and what that kind takes."""
    tokeniser: TokeniserSettings
    """How text becomes tokens."""


def build_corpus(settings: CorpusSettings, directory: Path, *, restart: bool = False) -> Corpus:
    """Returns the corpus at `directory`: made now, unless it was made before from the same text and settings."""
    files = settings.source.files()
    content = digest_of_json([(name, digest_of_file(path)) for name, path in files])
    stage = Stage(CORPUS_KIND, CORPUS_VERSION, settings.as_json(), {"text": content}, cheap=True)
    stage.make(directory, lambda draft: _fill(settings, draft), restart=restart)
    return Corpus(directory)


def _fill(settings: CorpusSettings, draft: artifact.Draft) -> tuple[dict, list[str]]:
    """Tokenises all splits into the draft; returns the facts and the files of the finished corpus."""
    if notice := settings.source.split_notice():
        say(notice)
    tokeniser = _tokeniser(settings, draft.directory)
    facts = {"vocabulary": tokeniser.size, "splits": {}}
    journal = _Journal(draft.scratch("journal.json"))
    with bar("tokenise", settings.source.text_bytes(), journal.bytes_done()) as progress:
        for split in SPLITS:
            counts = _tokenise(settings, tokeniser, split, draft=draft, journal=journal, progress=progress)
            kept = ("documents", "tokens", "words", "characters")
            facts["splits"][split] = {key: getattr(counts, key) for key in kept}
    return facts, ["tokeniser.json", *(f"{split}.names" for split in SPLITS)]


def _tokeniser(settings: CorpusSettings, directory: Path) -> Tokeniser:
    """Returns the tokeniser in `directory`; learns it first unless an earlier run has left it there."""
    path = directory / "tokeniser.json"
    if not path.exists():
        given = settings.tokeniser.kind == "pretrained"
        with bar("open the tokeniser" if given else "learn the tokeniser", None):
            tokeniser = learn_tokeniser(settings.tokeniser, lambda: _pieces(settings, "train"))
        write_atomically(path, json.dumps(tokeniser.to_json(), ensure_ascii=False))
    return read_tokeniser(path)


def tokenise_files(paths: list[Path], tokeniser: Tokeniser, document_start: str | None = None) -> TokenStream:
    """Returns the documents of files and folders as one stream, held in RAM, for a memory to remember.

    `document_start` is a regular expression for a line that begins a new document in a file.
    """
    places = [str(resolved_path(path)) for path in paths]
    source = TextFiles(kind="text", path=places, document_start=document_start)
    tokens, ends, names = [np.zeros(0, token_dtype(tokeniser.size))], [], []
    count = own = 0
    for batch in _batches(_in_order(source.all_documents())):
        if not isinstance(tokeniser, ByteTokeniser):
            for piece in batch:
                piece.refuse_unless_text()
        for piece, ids in zip(batch, tokeniser.encode([piece.text for piece in batch])):
            own += len(ids)
            if piece.ends_document and not own:
                say(_empty(piece))
                continue
            tokens.append(_with_end(piece, ids, tokeniser).astype(tokens[0].dtype))
            count += len(tokens[-1])
            if piece.ends_document:
                names.append(piece.name_in_a_line)
                ends.append(count)
                own = 0
    if not names:
        raise InputError(f"{', '.join(map(str, paths))}: there is no text in it; give files with text")
    return TokenStream(np.concatenate(tokens), np.array(ends, np.int64), lambda: names, start=tokeniser.start)


def _empty(piece: "_Piece") -> str:
    """Returns the line about a document that has no token and is left out."""
    return f"{piece.document} is empty and makes no document"


def _with_end(piece: "_Piece", ids: np.ndarray, tokeniser: Tokeniser) -> np.ndarray:
    """Returns the ids of a piece, followed by the end of its document where the tokeniser has a token for that."""
    end = tokeniser.end_of_document
    return ids if end is None or not piece.ends_document else np.append(ids, end)


def _pieces(settings: CorpusSettings, split: Split) -> Iterator[bytes]:
    """Yields the text of a split in pieces; they must be UTF-8 unless tokens are bytes."""
    for piece in _in_order(settings.source.documents(split)):
        if settings.tokeniser.kind != "bytes":
            piece.refuse_unless_text()
        yield piece.text


@dataclass
class _Counts:
    """Progress of a split, in several units; most of them go into the manifest of the finished corpus."""

    documents: int = 0
    tokens: int = 0
    words: int = 0
    """Words separated by white space, plus line ends."""
    characters: int = 0
    bytes: int = 0
    """Bytes of text."""
    name_bytes: int = 0
    """Bytes in the file of names."""
    pieces: int = 0
    """Pieces that are done of the document that is not finished yet."""
    begun_tokens: int = 0
    """Tokens of the document that is not finished yet."""
    left_out: int = 0
    """Documents without a token, which are left out."""

    @property
    def documents_read(self) -> int:
        """Number of documents of the source that are done."""
        return self.documents + self.left_out


@dataclass(frozen=True)
class _Piece:
    """A piece of a document, to be tokenised."""

    document: str
    """Name of the document."""
    text: bytes
    ends_document: bool
    """Whether this is the last piece of its document."""

    @property
    def name_in_a_line(self) -> str:
        """Name of the document on a single line, in valid UTF-8."""
        return self.document.replace("\n", " ").encode("utf-8", "replace").decode()

    def refuse_unless_text(self) -> None:
        """Raises an error unless the text is UTF-8."""
        try:
            self.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.document} is not UTF-8 (byte 0x{self.text[error.start]:02x}); convert it, or read the bytes "
                "as they are with corpus.tokeniser.kind=bytes"
            ) from None


class _Journal:
    """A file that records how much of each split is safely on disk."""

    def __init__(self, path: Path):
        self._path = path
        content = read_json(path, dict[str, _Counts], remedy="give --restart to begin again") if path.exists() else {}
        self._splits = {split: content.get(split, _Counts()) for split in SPLITS}

    def of(self, split: Split) -> _Counts:
        """Returns the counts of a split."""
        return self._splits[split]

    def bytes_done(self) -> int:
        """Returns the number of bytes of text that are done, in all splits together."""
        return sum(counts.bytes for counts in self._splits.values())

    def save(self) -> None:
        """Writes the counts to the file."""
        write_json(self._path, {split: asdict(counts) for split, counts in self._splits.items()})


def _tokenise(
    settings: CorpusSettings,
    tokeniser: Tokeniser,
    split: Split,
    *,
    draft: artifact.Draft,
    journal: _Journal,
    progress: Bar,
) -> _Counts:
    """Tokenises a split: appends tokens, ends of documents and names to what the journal says is on disk."""
    counts = journal.of(split)
    dtype = token_dtype(tokeniser.size)
    sizes = {"tokens": counts.tokens * dtype.itemsize, "documents": counts.documents * 8, "names": counts.name_bytes}
    outputs = {name: _reopen(draft.directory / f"{split}.{name}", size) for name, size in sizes.items()}
    saved = time.monotonic()

    def save() -> None:
        """Syncs the output files to disk, then records in the journal how far they go."""
        for file in outputs.values():
            file.flush()
            os.fsync(file.fileno())
        journal.save()

    def append(piece: _Piece, ids: np.ndarray) -> None:
        """Writes the tokens of a piece, and the end and the name of a document that it completes."""
        counts.begun_tokens += len(ids)
        counts.bytes += len(piece.text)
        counts.pieces += 1
        if piece.ends_document and not counts.begun_tokens:
            say(_empty(piece))
            counts.left_out += 1
            counts.pieces = 0
            return
        ids = _with_end(piece, ids, tokeniser)
        outputs["tokens"].write(ids.astype(dtype).tobytes())
        # Where tokens are bytes, bytes also count as characters: enwik8's figures are per byte.
        text = piece.text if settings.tokeniser.kind == "bytes" else piece.text.decode()
        counts.tokens += len(ids)
        counts.words += len(text.split()) + piece.text.count(b"\n")
        counts.characters += len(text)
        if piece.ends_document:
            name = piece.name_in_a_line.encode() + b"\n"
            outputs["names"].write(name)
            outputs["documents"].write(np.array([counts.tokens], "<i8").tobytes())
            counts.name_bytes += len(name)
            counts.documents += 1
            counts.pieces = counts.begun_tokens = 0

    try:
        documents = islice(settings.source.documents(split), counts.documents_read, None)
        for batch in _batches(islice(_in_order(documents), counts.pieces, None)):
            if settings.tokeniser.kind != "bytes":
                for piece in batch:
                    piece.refuse_unless_text()
            for piece, ids in zip(batch, tokeniser.encode([piece.text for piece in batch])):
                append(piece, ids)
                progress.advance(len(piece.text))
            progress.say(f"{split}: {counts.tokens:,} tokens, {counts.documents:,} documents")
            if time.monotonic() - saved > _SAVE_SECONDS:
                save()
                saved = time.monotonic()
        save()
    finally:
        for file in outputs.values():
            file.close()
    if counts.tokens == 0:
        raise InputError(f"the {split} split has no text; look at corpus.source ({settings.source.as_json()})")
    draft.declare(f"{split}.tokens", dtype, (counts.tokens,))
    draft.declare(f"{split}.documents", "<i8", (counts.documents,))
    return counts


def _reopen(path: Path, size: int) -> BinaryIO:
    """Opens a file for appending after its first `size` bytes; removes what a killed run wrote beyond them."""
    path.touch()
    if path.stat().st_size < size:
        raise InputError(f"{path} has lost bytes since it was written; give --restart to begin again")
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def _in_order(documents: Iterator[Document]) -> Iterator[_Piece]:
    """Yields the pieces of documents, the last of each marked as such."""
    for document in documents:
        held = None
        for text in document.pieces:
            if held is not None:
                yield _Piece(document.name, held, ends_document=False)
            held = text
        yield _Piece(document.name, held or b"", ends_document=True)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Yields pieces in groups of a few megabytes, so that a tokeniser can work on many of them at once."""
    held: list[_Piece] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece.text)
        if size >= _BATCH_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held
