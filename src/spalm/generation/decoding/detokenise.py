"""Text from tokens that arrive one by one."""

from collections.abc import Sequence

from spalm.corpus import Tokeniser

_BROKEN = "\ufffd"
"""Replacement character, which the tokeniser decodes in place of incomplete bytes."""


class IncrementalDetokeniser:
    """Turns tokens into text. A character may take several tokens and is returned with the last of them.

    Only the tokens of the character before are decoded again, because what a token adds depends on what it follows:
    words are separated by a space, except after a line end.
    """

    def __init__(self, tokeniser: Tokeniser, before: Sequence[int] = ()):
        self._tokeniser = tokeniser
        self._before, self._pending = list(before[-1:]), list[int]()
        if _BROKEN in tokeniser.decode(self._before):
            self._before = []

    def add(self, token: int) -> str:
        """Returns what a token adds to the text; nothing while a character is not complete."""
        self._pending.append(token)
        text = self._decode_pending()
        if text.endswith(_BROKEN):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def rest(self) -> str:
        """Returns what is left of a character that no token completed."""
        return self._decode_pending() if self._pending else ""

    def _decode_pending(self) -> str:
        decode = self._tokeniser.decode
        return decode([*self._before, *self._pending])[len(decode(self._before)) :]


def token_texts(tokeniser: Tokeniser, tokens: Sequence[int]) -> list[str]:
    """Returns what each token of a text adds to it."""
    detokeniser = IncrementalDetokeniser(tokeniser)
    found = [detokeniser.add(token) for token in tokens]
    if found:
        found[-1] += detokeniser.rest()
    return found
