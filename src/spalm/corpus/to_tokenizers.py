"""Tokenisers in the format of the `tokenizers` library, tokenizer.json, which other software reads."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from spalm.corpus.display import BYTE_LEVEL_ALPHABET
from spalm.corpus.tokeniser import END_OF_DOCUMENT, END_OF_LINE, UNKNOWN, Tokeniser

START = "<|start|>"
"""Symbol for x_0 where x_0 is a line end, which also occurs in text. Its id is the first beyond the vocabulary."""


def to_fast_tokenizer(tokeniser: Tokeniser) -> tuple[Tokenizer, str]:
    """Returns a tokeniser that gives the same ids for the same text, and the name of the symbol that stands for x_0.

    The symbol is not put before a text.
    """
    content = tokeniser.to_json()
    match content["kind"]:
        case "pretrained":
            made = Tokenizer.from_str(json.dumps(content["tokeniser"]))
            symbol = made.id_to_token(tokeniser.start) or START
        case "bpe":
            made, symbol = Tokenizer.from_str(json.dumps(content["bpe"])), END_OF_DOCUMENT
        case "words":
            made, symbol = _words(content["words"]), START
        case _:
            made, symbol = _bytes(), START
    if made.token_to_id(symbol) is None:
        made.add_special_tokens([symbol])
    return made, symbol


def _words(words: list[str]) -> Tokenizer:
    """Returns a tokeniser of words and line ends, each with its index in `words` as its id."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    # Four characters are white space to Python but not to the library.
    made.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex("[\x1c-\x1f]"), " "), normalizers.Replace("\n", f" {END_OF_LINE} ")]
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    joined = [decoders.WordPiece(prefix="\0", cleanup=False), decoders.Fuse()]
    line_ends = [(f" {END_OF_LINE}", "\n"), (END_OF_LINE, "\n"), ("\n ", "\n")]
    made.decoder = decoders.Sequence(joined + [decoders.Replace(old, new) for old, new in line_ends])
    return made


def _bytes() -> Tokenizer:
    """Returns a tokeniser of the 256 bytes."""
    made = Tokenizer(models.BPE(vocab=BYTE_LEVEL_ALPHABET, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made
