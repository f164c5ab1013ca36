"""Numbers of the texts that a model reads side by side. A number is free again when its text is no longer used."""

import weakref
from dataclasses import dataclass


@dataclass(eq=False)
class SequenceState:
    """A text that is being read: its number, and how many of its tokens the model has read."""

    number: int
    tokens: int = 0


class SequenceNumbers:
    """The numbers from `first` on, `count` of them; None: as many as are needed."""

    def __init__(self, first: int = 0, count: int | None = None):
        self._next, self._end = first, None if count is None else first + count
        self._free: list[int] = []

    def begin(self) -> SequenceState | None:
        """Returns the state of a new text, with the lowest free number; None if all numbers are in use.

        Whatever the model holds under that number belongs to an earlier text.
        """
        if self._free:
            number = min(self._free)
            self._free.remove(number)
        elif self._end is None or self._next < self._end:
            number, self._next = self._next, self._next + 1
        else:
            return None
        state = SequenceState(number)
        weakref.finalize(state, self._free.append, number)  # in any thread
        return state
