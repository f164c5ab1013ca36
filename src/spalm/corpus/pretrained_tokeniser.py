"""The tokeniser of a pretrained model: its tokenizer.json, read by the library that wrote it."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from spalm.corpus.display import BYTE_LEVEL_ALPHABET, spell_byte_level, spell_bytes
from spalm.errors import InputError
from spalm.files import read_json, validated
from spalm.manifest import Size

_ANEW = "save the model anew"
"""Remedy of a damaged file."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""Form of a token that stands for a single byte."""


_Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
_Tokens = _Token | Annotated[list[_Token], Field(max_length=1000)] | None


class _Generation(BaseModel):
    """What `generation_config.json` says of tokens."""

    eos_token_id: _Tokens = None


class _TextConfig(_Generation):
    """What the configuration of a language model says of tokens."""

    vocab_size: Size
    bos_token_id: _Tokens = None


class _Config(BaseModel):
    """The form of `config.json` where it describes a language model and others, such as one that sees."""

    text_config: _TextConfig


class PretrainedTokeniser:
    """The tokeniser of a pretrained model."""

    separator = ""
    """Text between two tokens where tokens are shown one by one."""
    end_of_document = None
    """None: no token is put after a document, because what the model saw there in training is not known."""

    def __init__(self, tokeniser: Tokenizer, size: int, start: int, *, end_tokens: list[int]):
        self._tokeniser = tokeniser
        self.size, self.start = size, start
        self.end_tokens = frozenset(end_tokens)
        """Tokens with which the model ends an answer."""
        self._byte_level = "ByteLevel" in json.dumps(json.loads(tokeniser.to_str()).get("decoder"))
        # Some tokenisers drop a space at the beginning of what they decode, so a token is always put before it.
        self._anchor = tokeniser.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = tokeniser.decode(self._anchor)

    @classmethod
    def of_model(cls, folder: Path) -> "PretrainedTokeniser":
        """Reads the tokeniser in a model's folder.

        Its `size` is that of the model's output layer, which is often larger than the tokeniser's vocabulary.
        """
        try:
            config = _read_config(folder / "config.json")
            tokeniser = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise InputError(f"{folder} has no config.json and tokenizer.json that can be read ({error})") from None
        tokeniser.no_truncation()
        tokeniser.no_padding()
        size = max(config.vocab_size, tokeniser.get_vocab_size())
        begins, ends = _as_list(config.bos_token_id), _as_list(config.eos_token_id)
        start = next((id for id in [*begins, *ends] if id < size), 0)
        # Chat models may end answers with other tokens.
        if (generating := folder / "generation_config.json").is_file():
            ends = ends + _as_list(read_json(generating, _Generation, remedy=_ANEW).eos_token_id)
        return cls(tokeniser, size, start, end_tokens=ends)

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each piece of text, without special tokens."""
        texts = [piece.decode() for piece in pieces]
        found = self._tokeniser.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in found]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text, and a row (start, end) for each: the characters that the token stands for."""
        encoding = self._tokeniser.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens that the model is given to continue a text, with the special tokens it expects."""
        return self._tokeniser.encode(text).ids or [self.start]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns ids as text that continues another: a space at its beginning stays."""
        ids = [*self._anchor, *(id for id in ids if self._tokeniser.id_to_token(id) is not None)]
        return self._tokeniser.decode(ids, skip_special_tokens=False)[len(self._anchor_text) :]

    def spell(self, id: int) -> str:
        """Returns one token as text."""
        token = self._tokeniser.id_to_token(id)
        if token is None:
            return f"⟨token {id}⟩"  # in the output layer, but not in the tokeniser
        if byte := _BYTE.fullmatch(token):
            return spell_bytes(bytes.fromhex(byte[1]))
        if self._byte_level and all(letter in BYTE_LEVEL_ALPHABET for letter in token):
            return spell_byte_level(token)
        return self.decode([id])

    def to_json(self) -> dict[str, Any]:
        """Returns everything from which `from_json` makes the same tokeniser."""
        numbers = {"size": self.size, "start": self.start, "ends": sorted(self.end_tokens)}
        return {"kind": "pretrained", **numbers, "tokeniser": json.loads(self._tokeniser.to_str())}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PretrainedTokeniser":
        """Returns the tokeniser whose `to_json` gave `content`."""
        tokeniser = Tokenizer.from_str(json.dumps(content["tokeniser"]))
        return cls(tokeniser, content["size"], content["start"], end_tokens=content["ends"])


def _read_config(path: Path) -> _TextConfig:
    """Reads the configuration of a model, or of the language model in it."""
    content = read_json(path, dict, remedy=_ANEW)
    if "text_config" in content:
        return validated(content, _Config, path, remedy=_ANEW).text_config
    return validated(content, _TextConfig, path, remedy=_ANEW)


def _as_list(ids: int | list[int] | None) -> list[int]:
    """Returns the token ids of a configuration's entry, which may be None, one id or several, as a list."""
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
