"""Legible tokens: invisible characters get a visible sign, bytes that are no text are written in hexadecimal."""

import unicodedata
from typing import Protocol

_SIGNS = {"\n": "↵", "\t": "→", " ": "·", "\u00a0": "␣"}
"""Visible sign for each invisible character, where a token is shown by itself."""
_SIGNS_IN_TEXT = {" ": " ", "\n": "↵\n"}
"""Signs that differ from `_SIGNS` inside a running text."""


class TokenSpeller(Protocol):
    """Anything that can write one token as text, such as every tokeniser."""

    def spell(self, id: int) -> str:
        """Returns one token as text."""
        ...


def visible_token(tokeniser: TokenSpeller, token: int) -> str:
    """Returns a token with its spaces, line ends and other invisible characters made visible."""
    return "".join(_SIGNS.get(letter) or _visible(letter) for letter in tokeniser.spell(token)) or "∅"


def token_in_text(tokeniser: TokenSpeller, token: int) -> str:
    """Returns a token as part of a running text.

    Spaces stay spaces unless the token is nothing else, and a line end gets a sign before it.
    """
    text = tokeniser.spell(token)
    if not text.strip() and "\n" not in text:
        return visible_token(tokeniser, token)
    return "".join(_SIGNS_IN_TEXT.get(letter) or _SIGNS.get(letter) or _visible(letter) for letter in text)


def _visible(letter: str) -> str:
    """Returns a character as it is, or a sign for it if it is invisible."""
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    match unicodedata.category(letter)[0]:
        case "C":
            return f"⟨{ord(letter):X}⟩"
        case "Z":
            return "␣"
        case _:
            return letter


def spell_bytes(content: bytes) -> str:
    """Returns bytes as text where they are UTF-8, in hexadecimal otherwise."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"⟨{content.hex().upper()}⟩"


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each letter of byte-level BPE stands for."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
"""Byte that each letter of byte-level BPE stands for: printable bytes are themselves, the others start at U+0100."""


def spell_byte_level(token: str) -> str:
    """Returns a token of byte-level BPE as text."""
    return spell_bytes(bytes(BYTE_LEVEL_ALPHABET[letter] for letter in token))
