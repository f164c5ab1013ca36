"""Tokens made legible: what leaves no trace on paper gets a sign, what is no text its bytes in hexadecimal."""

import unicodedata

from spalm.corpus.tokeniser import Tokeniser

_SIGNS = {"\n": "↵", "\t": "→", " ": "·", "\u00a0": "␣"}

_IN_TEXT = {" ": " ", "\n": "↵\n"}


def shown(tokeniser: Tokeniser, token: int) -> str:
    """A token with its blanks, line ends and other invisible signs made visible."""
    return "".join(_SIGNS.get(letter) or _visible(letter) for letter in tokeniser.spell(token)) or "∅"


def in_text(tokeniser: Tokeniser, token: int) -> str:
    """A token as a part of a text: spaces stay spaces, unless there is nothing else, and lines end with a sign."""
    text = tokeniser.spell(token)
    if not text.strip() and "\n" not in text:
        return shown(tokeniser, token)
    return "".join(_IN_TEXT.get(letter) or _SIGNS.get(letter) or _visible(letter) for letter in text)


def _visible(letter: str) -> str:
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    match unicodedata.category(letter)[0]:
        case "C":
            return f"⟨{ord(letter):X}⟩"
        case "Z":
            return "␣"
        case _:
            return letter
