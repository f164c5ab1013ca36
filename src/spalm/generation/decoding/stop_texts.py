"""Answers are cut where the first stop text begins."""

from dataclasses import replace

from spalm.generation.answer import Chunk, GeneratedToken


class StopTexts:
    """Takes the tokens of one answer and returns the text that is certain by then, cut at the first stop text.

    Text that may be the beginning of a stop text is held back, with its tokens, until that is decided.
    """

    def __init__(self, stops: list[str]):
        self._stops = stops
        self._text, self._shown = "", 0
        self._held: list[tuple[int, GeneratedToken]] = []

    def add(self, token: GeneratedToken) -> Chunk:
        """Adds a token and returns what can be shown. A chunk with a reason to finish is the last."""
        self._held.append((len(self._text), token))
        self._text += token.text
        if found := [at for at in (self._text.find(stop) for stop in self._stops) if at >= 0]:
            end = min(found)
            cut = [replace(one, text=one.text[: end - begin]) for begin, one in self._held if begin < end]
            return Chunk(self._text[self._shown : end], cut, "stop", generated=1)
        ended = token.finish_reason is not None
        overlap = 0 if ended else max((_overlap(self._text, stop) for stop in self._stops), default=0)
        certain = len(self._text) - overlap
        sure = [one for begin, one in self._held if ended or begin < certain >= begin + len(one.text)]
        self._held = self._held[len(sure) :]
        text, self._shown = self._text[self._shown : certain], certain
        return Chunk(text, sure, token.finish_reason, generated=1)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
