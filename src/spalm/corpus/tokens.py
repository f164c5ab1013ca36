"""Token arrays on disk: for each split its tokens, the end of each document, and the names of the documents."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from spalm.artifact import Artifact
from spalm.corpus.sources.text_source import SPLITS, Split
from spalm.corpus.tokeniser import Tokeniser, read_tokeniser
from spalm.errors import DamagedError
from spalm.files import read_text, write_atomically
from spalm.manifest import Count, Size

CORPUS_KIND = "corpus"
"""Kind of artifact."""
CORPUS_VERSION = 1
"""Version of the files' format."""
_AT_ONCE = 1 << 24
"""Number of tokens that are looked at together."""


def token_dtype(vocabulary: int) -> np.dtype:
    """Returns the smallest unsigned integer type that holds every id of the vocabulary, little-endian."""
    return np.dtype("u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


class TokenStream:
    """The tokens of all documents in a row; document d, called names[d], is tokens[ends[d-1]:ends[d]].

    Position i stands for the prediction of tokens[i] from `start` and tokens[:i], so a stream of n tokens has n
    positions, and every array that belongs to it (log-probabilities, keys, neighbours) has n rows.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, names: Callable[[], list[str]], *, start: int):
        self.tokens, self.ends, self.start = tokens, ends, start
        self._read_names = names

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def names(self) -> list[str]:
        """Names of the documents."""
        return self._read_names()

    @cached_property
    def begins(self) -> np.ndarray:
        """Position at which each document begins."""
        return np.concatenate([np.zeros(1, np.int64), self.ends])[: len(self.ends)]

    def documents_of(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of the document that holds each position."""
        return np.searchsorted(self.ends, positions, side="right")

    def document_of(self, position: int) -> tuple[str, int]:
        """Returns the name of the document that holds a position, and the offset in it, in tokens."""
        number = int(self.documents_of(np.array(position)))
        return self.names[number], position - int(self.begins[number])

    def beginning(self, count: int) -> "TokenStream":
        """Returns the first `count` tokens; the last document is cut where they end."""
        documents = int(np.searchsorted(self.begins, count)) if count < len(self) else len(self.ends)
        ends = np.minimum(self.ends[:documents], count)
        return TokenStream(self.tokens[:count], ends, lambda: self.names[:documents], start=self.start)

    def only(self, documents: np.ndarray) -> "TokenStream":
        """Returns the documents for which a mask is true."""
        lengths = self.ends - self.begins
        names = [name for name, kept in zip(self.names, documents.tolist()) if kept]
        tokens = self.tokens[np.repeat(documents, lengths)]
        return TokenStream(tokens, np.cumsum(lengths[documents]), lambda: names, start=self.start)

    def targets(self, positions: np.ndarray) -> np.ndarray:
        """Returns x_{t+1}, the tokens to be predicted at `positions`."""
        return self.tokens[positions].astype(np.int64)

    def inputs(self, positions: np.ndarray) -> np.ndarray:
        """Returns x_t, the token before each position; the start symbol before the first."""
        return np.where(positions == 0, self.start, self.tokens[positions - 1]).astype(np.int64)


class _SplitFacts(BaseModel):
    """What a corpus' manifest says of a split."""

    documents: Count
    tokens: Count
    words: Count
    characters: Count


class _Splits(BaseModel):
    train: _SplitFacts
    dev: _SplitFacts
    test: _SplitFacts


class _Facts(BaseModel):
    """The form of a corpus' facts."""

    vocabulary: Size
    splits: _Splits


class TokenSplit(TokenStream):
    """One split of a corpus."""

    def __init__(self, corpus: "Corpus", split: Split, start: int):
        tokens, ends = corpus.array(f"{split}.tokens"), corpus.array(f"{split}.documents")
        _refuse_unless_plausible(tokens, ends, corpus.vocabulary, path=corpus.directory / f"{split}.tokens")
        super().__init__(tokens, ends, lambda: _names(corpus, split, len(ends)), start=start)
        self.split: Split = split
        self._corpus = corpus.directory
        counts = corpus.facts["splits"][split]
        self.words: int = counts["words"]
        """Number of words separated by white space, plus line ends."""
        self.characters: int = counts["characters"]
        """Number of characters, or of bytes where tokens are bytes."""

    def __reduce__(self) -> tuple:
        """Pickles only the path and the split's name: another process opens the files itself."""
        return _open_split, (self._corpus, self.split)


def _names(corpus: "Corpus", split: Split, count: int) -> list[str]:
    """Returns the names of a split's documents."""
    path = corpus.intact(f"{split}.names")
    names = read_text(path).split("\n")[:-1]
    if len(names) != count:
        raise DamagedError(f"{path} has {len(names):,} names for {count:,} documents; make the corpus again")
    return names


def _refuse_unless_plausible(tokens: np.ndarray, ends: np.ndarray, vocabulary: int, *, path: Path) -> None:
    """Raises an error if documents do not follow one another, or tokens are not in the vocabulary."""
    arrays = tokens.ndim == ends.ndim == 1 and tokens.dtype.kind == "u" and ends.dtype.kind == "i"
    if not arrays or (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != len(tokens):
        raise DamagedError(f"{path} is damaged: its documents do not fit its tokens; make the corpus again")
    if vocabulary <= np.iinfo(tokens.dtype).max:
        for start in range(0, len(tokens), _AT_ONCE):
            if tokens[start : start + _AT_ONCE].max() >= vocabulary:
                raise DamagedError(f"{path} is damaged: a token is not in the vocabulary; make the corpus again")


class Corpus(Artifact):
    """A finished corpus: its tokeniser and its three splits."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, CORPUS_KIND, _Facts)
        self._splits: dict[Split, TokenSplit] = {}

    @cached_property
    def tokeniser(self) -> Tokeniser:
        """Tokeniser that made the tokens."""
        path = self.intact("tokeniser.json")
        found = read_tokeniser(path)
        if found.size != self.vocabulary:
            raise DamagedError(f"{path} has {found.size:,} tokens, the corpus {self.vocabulary:,}; make it again")
        return found

    def write_tokeniser(self, content: dict[str, Any]) -> None:
        """Replaces the file of the tokeniser."""
        write_atomically(self.directory / "tokeniser.json", json.dumps(content, ensure_ascii=False))

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.facts["vocabulary"]

    def split(self, split: Split) -> TokenSplit:
        """Returns one of the three splits."""
        assert split in SPLITS
        if split not in self._splits:
            self._splits[split] = TokenSplit(self, split, self.tokeniser.start)
        return self._splits[split]


def _open_split(directory: Path, split: Split) -> TokenSplit:
    return Corpus(directory).split(split)
