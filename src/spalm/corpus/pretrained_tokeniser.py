"""The tokeniser of a pretrained model: its tokenizer.json, read by the library that wrote it."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from spalm.corpus.spelling import LETTERS_TO_BYTES, spelled, spelled_letters
from spalm.errors import InputError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class PretrainedTokens:
    between = ""
    end_of_document = None
    """Nothing is put between documents: what the model was used to there is not known."""

    def __init__(self, tokeniser: Tokenizer, size: int, start: int, ends: list[int]):
        self._tokeniser = tokeniser
        self.size, self.start = size, start
        self.ends = frozenset(ends)
        """Tokens with which the model ends an answer."""
        self._byte_level = "ByteLevel" in json.dumps(json.loads(tokeniser.to_str()).get("decoder"))
        # Some tokenisers drop a blank at the beginning of what they decode: so something always stands before it.
        self._anchor = tokeniser.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = tokeniser.decode(self._anchor)

    @classmethod
    def of_model(cls, folder: Path) -> "PretrainedTokens":
        """From a model's folder. Its size is the model's: output layers are often longer than their tokenisers."""
        try:
            config = json.loads((folder / "config.json").read_text())
            tokeniser = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise InputError(f"{folder} has no config.json and tokenizer.json that can be read ({error})") from None
        tokeniser.no_truncation()
        tokeniser.no_padding()
        config = config.get("text_config", config)
        begins, ends = (_several(config.get(name)) for name in ("bos_token_id", "eos_token_id"))
        start = next(iter([*begins, *ends]), 0)
        if (generating := folder / "generation_config.json").is_file():  # a chat model may end an answer otherwise
            ends += _several(json.loads(generating.read_text()).get("eos_token_id"))
        return cls(tokeniser, max(int(config["vocab_size"]), tokeniser.get_vocab_size()), start, ends)

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        texts = [piece.decode() for piece in pieces]
        found = self._tokeniser.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in found]

    def prompt(self, text: str) -> list[int]:
        """What a model is to be given of a text: with the special tokens that it is used to."""
        return self._tokeniser.encode(text).ids or [self.start]

    def decode(self, ids: Iterable[int]) -> str:
        """As text that goes on: a blank at its beginning stays, also one that a tokeniser puts before every text."""
        ids = [*self._anchor, *(id for id in ids if self._tokeniser.id_to_token(id) is not None)]
        return self._tokeniser.decode(ids, skip_special_tokens=False)[len(self._anchor_text) :]

    def spell(self, id: int) -> str:
        token = self._tokeniser.id_to_token(id)
        if token is None:
            return f"⟨token {id}⟩"  # of the output layer, but of no text
        if byte := _BYTE.fullmatch(token):
            return spelled(bytes.fromhex(byte[1]))
        if self._byte_level and all(letter in LETTERS_TO_BYTES for letter in token):
            return spelled_letters(token)
        return self.decode([id])

    def to_json(self) -> dict[str, Any]:
        about = {"size": self.size, "start": self.start, "ends": sorted(self.ends)}
        return {"kind": "pretrained", **about, "tokeniser": json.loads(self._tokeniser.to_str())}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PretrainedTokens":
        tokeniser = Tokenizer.from_str(json.dumps(content["tokeniser"]))
        return cls(tokeniser, content["size"], content["start"], content["ends"])


def _several(ids: int | list[int] | None) -> list[int]:
    """A configuration names no token, one, or several."""
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
