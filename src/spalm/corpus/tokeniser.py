"""Tokenisers: words of tokenised text, byte-level BPE, bytes, those of pretrained models.

All turn bytes into ids and can write an id as text. The ids of words and of BPE are in order of falling frequency,
which is what an adaptive softmax needs.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer as Bpe
from tokenizers import decoders, models, pre_tokenizers, trainers

from spalm.corpus.display import spell_byte_level, spell_bytes
from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.errors import DamagedError, InputError, first_line
from spalm.files import read_json
from spalm.settings import Settings

END_OF_LINE = "<eos>"
"""Word that stands for a line end."""
UNKNOWN = "<unk>"
"""Word that stands for every word outside the vocabulary."""
END_OF_DOCUMENT = "<|document|>"
"""Token of BPE that ends a document, and stands before the first token of a text."""

_WORD_OR_LINE_END = re.compile(r"\n|\S+")
"""What one token of tokenised text stands for."""


class TokeniserSettings(Settings):
    """Settings of a tokeniser."""

    kind: Literal["words", "bpe", "bytes", "pretrained"]
    """words: for text that is tokenised already, a line end is <eos>; bpe: byte-level, learned from the training split;
    bytes: the 256 bytes; pretrained: the tokeniser of a pretrained model."""
    path: str | None = None
    """pretrained: folder of the model, with config.json and tokenizer.json."""
    size: int | None = Field(default=None, gt=1)
    """Vocabulary size of bpe, or the largest number of words to keep; bytes have 256."""
    mark_documents: bool = True
    """bpe: put a token after every document. Switch it off for text whose published figures have none (WikiText)."""
    sample_bytes: int = Field(default=64_000_000, gt=0)
    """bpe: number of bytes of the training split that the merges are learned from, at most."""


class Tokeniser(Protocol):
    """Turns text into token ids and back."""

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary."""
        ...

    @property
    def start(self) -> int:
        """Token that stands before the first token of a split: the paper's x_0."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """Token that is put after every document; None: no token is."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens with which a model ends what it generates."""
        ...

    @property
    def separator(self) -> str:
        """Text between two tokens where tokens are shown one by one."""
        ...

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens that a model is given to continue a text; at least one."""
        ...

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each piece of text."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text, and a row (start, end) for each: the characters that the token stands for."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns ids as text."""
        ...

    def spell(self, id: int) -> str:
        """Returns one token as text; bytes that are no text by themselves are written in hexadecimal."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Returns everything from which `tokeniser_from_json` makes the same tokeniser."""
        ...


class OwnTokeniser(ABC):
    """Common part of the tokenisers of models trained here: a prompt begins with the start symbol."""

    start: int
    """Token that stands before the first token of a text."""
    end_of_document: int | None
    """Token that is put after every document; None: no token is."""

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset() if self.end_of_document is None else frozenset([self.end_of_document])

    def prompt(self, text: str) -> list[int]:
        return [self.start, *self.encode([text.encode()])[0].tolist()]

    @abstractmethod
    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]: ...


class ByteTokeniser(OwnTokeniser):
    """The 256 bytes themselves."""

    size = 256
    start = ord("\n")
    end_of_document = None
    separator = ""

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(piece, np.uint8) for piece in pieces]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        character = np.repeat(np.arange(len(text)), [len(letter.encode()) for letter in text])
        return np.frombuffer(text.encode(), np.uint8), np.stack([character, character + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def spell(self, id: int) -> str:
        return spell_bytes(bytes([id]))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class WordTokeniser(OwnTokeniser):
    """Words separated by white space, and <eos> for every line end: the convention of WikiText's published figures."""

    end_of_document = None
    separator = " "

    def __init__(self, words: list[str]):
        self._words = words
        self._ids = {word: index for index, word in enumerate(words)}
        self.size = len(words)
        self.start = self._ids[END_OF_LINE]

    @classmethod
    def learn(cls, pieces: Iterable[bytes], size: int | None) -> "WordTokeniser":
        """Returns a tokeniser with the most frequent words of a text."""
        counts: Counter[str] = Counter()
        for piece in pieces:
            counts.update(_words_of(piece))
        # The two special words are always there; ties go by alphabet, so that the same text gives the same ids.
        counts[END_OF_LINE] += 0
        counts[UNKNOWN] += 0
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        special = (END_OF_LINE, UNKNOWN)
        if size is not None and len(ranked) > size:
            ordinary = [word for word in ranked if word not in special][: size - len(special)]
            kept = {*ordinary, *special}
            ranked = [word for word in ranked if word in kept]
        return cls(ranked)

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        unknown = self._ids[UNKNOWN]
        return [np.fromiter((self._ids.get(word, unknown) for word in _words_of(piece)), np.int64) for piece in pieces]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        offsets = [found.span() for found in _WORD_OR_LINE_END.finditer(text)]
        return self.encode([text.encode()])[0], np.array(offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        words = (self._words[index] for index in ids)
        return " ".join(words).replace(f" {END_OF_LINE}", "\n").replace(END_OF_LINE, "\n").replace("\n ", "\n")

    def spell(self, id: int) -> str:
        return self.decode([id])

    def to_json(self) -> dict[str, Any]:
        return {"kind": "words", "words": self._words}


class BpeTokeniser(OwnTokeniser):
    """Byte-level BPE: any text is represented exactly, nothing is unknown."""

    separator = ""

    def __init__(self, bpe: Bpe, *, mark_documents: bool):
        start = bpe.token_to_id(END_OF_DOCUMENT)
        assert start is not None
        self._bpe = bpe
        self.size = bpe.get_vocab_size()
        self.start = start
        self.end_of_document = start if mark_documents else None
        self._mark_documents = mark_documents

    @classmethod
    def learn(cls, pieces: Callable[[], Iterator[bytes]], size: int, *, mark_documents: bool) -> "BpeTokeniser":
        """Returns a tokeniser with merges learned from a text. Each call of `pieces` yields the text from its start."""
        bpe = Bpe(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if size <= len(alphabet) + 1:
            raise InputError(
                f"corpus.tokeniser.size = {size}: bpe needs more than the {len(alphabet) + 1} it starts with"
            )
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator((piece.decode() for piece in pieces()), trainer)
        return cls(_by_frequency(bpe, (piece.decode() for piece in pieces())), mark_documents=mark_documents)

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        texts = [piece.decode() for piece in pieces]
        return [np.array(encoding.ids, np.int64) for encoding in self._bpe.encode_batch_fast(texts)]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._bpe.encode(text)
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        return self._bpe.decode(list(ids), skip_special_tokens=False)

    def spell(self, id: int) -> str:
        token = self._bpe.id_to_token(id)
        assert token is not None
        return token if token == END_OF_DOCUMENT else spell_byte_level(token)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bpe", "mark_documents": self._mark_documents, "bpe": json.loads(self._bpe.to_str())}


def tokeniser_from_json(content: dict[str, Any]) -> Tokeniser:
    """Returns the tokeniser whose `to_json` gave `content`."""
    match content["kind"]:
        case "bytes":
            return ByteTokeniser()
        case "words":
            return WordTokeniser(content["words"])
        case "pretrained":
            return PretrainedTokeniser.from_json(content)
        case _:
            return BpeTokeniser(Bpe.from_str(json.dumps(content["bpe"])), mark_documents=content["mark_documents"])


def read_tokeniser(path: Path) -> Tokeniser:
    """Returns the tokeniser that a file holds."""
    content = read_json(path, dict)
    try:
        found = tokeniser_from_json(content)
        known = 0 <= found.start < found.size
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # tokenizers raises nothing narrower, and may panic
        raise DamagedError(f"{path} is damaged ({first_line(error)[:100]}); make it again") from None
    if not known:
        raise DamagedError(f"{path} is damaged (a token is not in its vocabulary); make it again")
    return found


def learn_tokeniser(settings: TokeniserSettings, pieces: Callable[[], Iterator[bytes]]) -> Tokeniser:
    """Returns the tokeniser that `settings` describe, learned from a text if its kind is learned.

    Each call of `pieces` yields the text from its start.
    """
    match settings.kind:
        case "bytes":
            if settings.size not in (None, ByteTokeniser.size):
                raise InputError(
                    f"corpus.tokeniser.size = {settings.size}: bytes have {ByteTokeniser.size}; leave it out"
                )
            return ByteTokeniser()
        case "words":
            return WordTokeniser.learn(pieces(), settings.size)
        case "pretrained":
            if settings.path is None:
                raise InputError("corpus.tokeniser.path is missing: give the folder of the pretrained model")
            return PretrainedTokeniser.of_model(Path(settings.path))
        case _:
            if settings.size is None:
                raise InputError("corpus.tokeniser.size is missing: give the size of the bpe, such as 8192")
            sample = lambda: _first_bytes(pieces(), settings.sample_bytes)  # noqa: E731
            return BpeTokeniser.learn(sample, settings.size, mark_documents=settings.mark_documents)


def _words_of(piece: bytes) -> Iterator[str]:
    """Yields the words of a text, with END_OF_LINE for every line end."""
    *lines, last = piece.decode().split("\n")
    for line in lines:
        yield from line.split()
        yield END_OF_LINE
    yield from last.split()


def _first_bytes(pieces: Iterable[bytes], budget: int) -> Iterator[bytes]:
    """Yields pieces until they hold `budget` bytes."""
    for piece in pieces:
        if budget <= 0:
            return
        yield piece
        budget -= len(piece)


def _by_frequency(bpe: Bpe, texts: Iterable[str]) -> Bpe:
    """Returns the same merges with new ids, the most frequent token first; the document mark keeps id 0."""
    counts = np.zeros(bpe.get_vocab_size(), np.int64)
    for batch in _in_groups(texts, 4):
        for encoding in bpe.encode_batch_fast(batch):
            counts += np.bincount(encoding.ids, minlength=len(counts))
    content = json.loads(bpe.to_str())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    ranked = sorted(vocabulary, key=lambda token: (token != END_OF_DOCUMENT, -counts[vocabulary[token]], token))
    content["model"]["vocab"] = {token: index for index, token in enumerate(ranked)}
    for special in content["added_tokens"]:
        special["id"] = content["model"]["vocab"][special["content"]]
    return Bpe.from_str(json.dumps(content))


def _in_groups(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields the items in lists of `size`."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
