"""What each token adds to a text, as the text grows."""

from collections.abc import Sequence

from spalm.corpus.tokeniser import Tokeniser

_BROKEN = "\ufffd"


class Letters:
    """Tokens in, letters out. A letter may take several tokens: it comes with the last of them.

    Only the letters just before are decoded again, for what a token adds depends on what it stands behind: words have a
    blank between them, but none after a line's end.
    """

    def __init__(self, tokeniser: Tokeniser, before: Sequence[int] = ()):
        self._tokeniser = tokeniser
        self._before, self._pending = list(before[-1:]), list[int]()
        if _BROKEN in tokeniser.decode(self._before):
            self._before = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._new()
        if text.endswith(_BROKEN):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def rest(self) -> str:
        """What is left of a letter that no token completed."""
        return self._new() if self._pending else ""

    def _new(self) -> str:
        decode = self._tokeniser.decode
        return decode([*self._before, *self._pending])[len(decode(self._before)) :]


def pieces(tokeniser: Tokeniser, tokens: Sequence[int]) -> list[str]:
    """What each token of a text adds to it."""
    letters = Letters(tokeniser)
    found = [letters.add(token) for token in tokens]
    if found:
        found[-1] += letters.rest()
    return found
