"""Prompts with passages of the memory in them, within the length that a model reads.

A text gets the passages before it, the best next to it, with a blank line after each. A message of a conversation gets
a line before them that says what they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from spalm.corpus import Tokeniser
from spalm.generation.passages.ranking import RankedPassage

_HEADING = "Use what is relevant of these passages:"
"""Line before the passages in a message."""
_LEAST = 16
"""Number of tokens of a passage below which it is left out instead of being cut."""
_BROKEN = "\ufffd"
"""Replacement character, which the tokeniser decodes in place of incomplete bytes."""


def text_with_passages(text: str, passages: Sequence[RankedPassage]) -> str:
    """Returns a text that is to be continued, with passages, given best first, before it."""
    return "\n\n".join([*(passage.text for passage in reversed(passages)), text])


def message_with_passages(message: str, passages: Sequence[RankedPassage]) -> str:
    """Returns a message of a conversation with passages, given best first, before it."""
    return f"{_HEADING}\n\n{text_with_passages(message, passages)}" if passages else message


def fit_passages(
    passages: Sequence[RankedPassage],
    render: Callable[[list[RankedPassage]], list[int]],
    tokeniser: Tokeniser,
    *,
    room: int | None,
) -> tuple[list[int], list[RankedPassage]]:
    """Returns the tokens of a prompt of at most `room` tokens, None: any number, and the passages that are in it.

    `render` returns the tokens of the prompt with some passages. If they are too many, the last passage is cut at its
    end; one of which less than 16 tokens would be left is left out, and the one before it is cut. A prompt that is too
    long without any passage is returned as it is.
    """
    used = list(passages)
    while True:
        tokens = render(used)
        excess = 0 if room is None else len(tokens) - room
        if excess <= 0 or not used:
            return tokens, used
        shorter = _cut(used.pop(), excess, tokeniser)
        used += [] if shorter is None else [shorter]


def _cut(passage: RankedPassage, excess: int, tokeniser: Tokeniser) -> RankedPassage | None:
    """Returns a passage without its last tokens, so many of them; None if too little would be left."""
    tokens = tokeniser.encode([passage.text.encode()])[0]
    left = len(tokens) - excess
    text = tokeniser.decode(tokens[: max(0, left)].tolist()).rstrip(_BROKEN).rstrip()
    if left < _LEAST or len(text) >= len(passage.text):
        return None
    return replace(passage, text=text, tokens=left)
