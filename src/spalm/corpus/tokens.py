"""Token arrays on disk: for each split the tokens, where each document ends, and the documents' names."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from spalm.artifact import Artifact
from spalm.corpus import tokeniser as tokenisers
from spalm.corpus.sources.document import SPLITS, Split
from spalm.corpus.tokeniser import Tokeniser

KIND = "corpus"
VERSION = 1


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned integer that holds every id of the vocabulary, little-endian."""
    return np.dtype("u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


class TokenStream:
    """`tokens` of all documents in a row; document d, called names[d], is tokens[ends[d-1]:ends[d]].

    Position i stands for the prediction of tokens[i] from `start` and tokens[:i], so a stream of n tokens has n
    positions, and every array that belongs to it (log-probabilities, keys, neighbours) has n rows.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, names: Callable[[], list[str]], start: int):
        self.tokens, self.ends, self.start = tokens, ends, start
        self._read_names = names

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def names(self) -> list[str]:
        return self._read_names()

    @cached_property
    def begins(self) -> np.ndarray:
        """Where each document begins."""
        return np.concatenate([np.zeros(1, np.int64), self.ends])[: len(self.ends)]

    def documents_of(self, positions: np.ndarray) -> np.ndarray:
        """The number of the document that holds each position."""
        return np.searchsorted(self.ends, positions, side="right")

    def document_of(self, position: int) -> tuple[str, int]:
        """The name of the document that holds a position, and the position's offset in it, in tokens."""
        number = int(self.documents_of(np.array(position)))
        return self.names[number], position - int(self.begins[number])

    def beginning(self, count: int) -> "TokenStream":
        """Its first tokens, the last document cut where they end."""
        documents = int(np.searchsorted(self.begins, count)) if count < len(self) else len(self.ends)
        ends = np.minimum(self.ends[:documents], count)
        return TokenStream(self.tokens[:count], ends, lambda: self.names[:documents], self.start)

    def targets(self, positions: np.ndarray) -> np.ndarray:
        """x_{t+1}: the tokens to be predicted at `positions`."""
        return self.tokens[positions].astype(np.int64)

    def inputs(self, positions: np.ndarray) -> np.ndarray:
        """x_t: the token before each position, the start symbol before the first."""
        return np.where(positions == 0, self.start, self.tokens[positions - 1]).astype(np.int64)


class TokenSplit(TokenStream):
    """One split of a corpus."""

    def __init__(self, corpus: Artifact, split: Split, start: int):
        names = corpus.directory / f"{split}.names"
        super().__init__(
            corpus.array(f"{split}.tokens"),
            corpus.array(f"{split}.documents"),
            lambda: names.read_text(encoding="utf-8").split("\n")[:-1],
            start,
        )
        self.split, self._corpus = split, corpus.directory
        counts = corpus.facts["splits"][split]
        self.words: int = counts["words"]
        self.characters: int = counts["characters"]

    def __reduce__(self) -> tuple:
        """It goes to another process as a path."""
        return _open_split, (self._corpus, self.split)


class Corpus(Artifact):
    """A finished corpus: its tokeniser and its three splits."""

    def __init__(self, directory: Path | str):
        super().__init__(directory, KIND)

    @cached_property
    def tokeniser(self) -> Tokeniser:
        return tokenisers.from_json(json.loads((self.directory / "tokeniser.json").read_text()))

    @property
    def vocabulary(self) -> int:
        return self.facts["vocabulary"]

    def split(self, split: Split) -> TokenSplit:
        assert split in SPLITS
        return TokenSplit(self, split, self.tokeniser.start)


def _open_split(directory: Path, split: Split) -> TokenSplit:
    return Corpus(directory).split(split)
