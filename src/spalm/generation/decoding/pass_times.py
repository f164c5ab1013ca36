"""How long a model takes for a pass, by the number of tokens in it, measured while text is generated."""

import numpy as np
from jaxtyping import Float, Int

_PRIOR_COST = 0.4
"""Time that each further token adds to a pass before that was measured, in passes over one token."""
_PRIOR_WEIGHT = 0.002
"""Sum of squared differences of passes' 1 / tokens that counts as much as the assumed cost."""
_MEMORY = 0.97
"""Factor by which the weight of a pass falls with each later one."""
_LINE_WEIGHT = 2.0
"""Number of passes over some number of tokens that count as much as the line through all passes."""
_TABLE = 128
"""Number of columns of the table of passes that were seen."""
_SURPRISE = 3
"""A pass that takes longer than this many times what is expected counts as that: it waited for something else."""
_CONTROL = 16
"""Every so many passes, one is made without drafts, so that its time is known."""


class PassTimes:
    """Times of passes by their numbers of tokens, for one model: seconds = base + each * tokens.

    Noise grows with the time of a pass, so what is fitted is the line seconds / tokens = each + base * (1 / tokens).
    Later passes count more. Where passes over some number of tokens were seen, their mean corrects the line: one token
    is read by other loops than several.
    """

    def __init__(self) -> None:
        self.others = 0
        """Number of tokens that other answers read in the same pass."""
        self._passes = 0
        self._sums = np.zeros(5)  # of weights, x, x**2, y and x * y, where x = 1 / tokens and y = seconds / tokens
        self._seen = np.zeros((2, _TABLE))  # weights and seconds of passes, by their number of tokens

    @property
    def next_is_control(self) -> bool:
        """Whether the next pass should be made without drafts."""
        return self._passes % _CONTROL == _CONTROL - 1

    def note(self, tokens: int, seconds: float) -> None:
        """Adds the time of one pass. The first does not count: loops are compiled and files are opened in it."""
        self._passes += 1
        if self._passes == 1:
            return
        seconds = min(seconds, self.longest(tokens))
        x, y = 1 / tokens, seconds / tokens
        self._sums = _MEMORY * self._sums + [1, x, x**2, y, x * y]
        self._seen *= _MEMORY
        if tokens < _TABLE - 1:  # the last column stays empty
            self._seen[:, tokens] += 1, seconds

    def seconds(self, tokens: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Returns the times of passes over these numbers of tokens."""
        base, each = self._line()
        weights, seen = self._seen[:, np.minimum(tokens, _TABLE - 1)]
        return (seen + _LINE_WEIGHT * (base + each * tokens)) / (weights + _LINE_WEIGHT)

    def longest(self, tokens: int) -> float:
        """Returns the highest time of a pass that counts; infinite before any was noted."""
        base, each = self._line()
        return _SURPRISE * (base + each * tokens) if self._sums[0] else np.inf

    def _line(self) -> tuple[float, float]:
        """Returns the seconds of a pass, and those of each of its tokens."""
        weight = self._sums[0]
        if not weight:
            return 1 - _PRIOR_COST, _PRIOR_COST
        x, squares, y, products = self._sums[1:] / weight
        prior = y * (1 - _PRIOR_COST) / (_PRIOR_COST + (1 - _PRIOR_COST) * x)
        known = weight * (squares - x**2)
        base = (weight * (products - x * y) + _PRIOR_WEIGHT * prior) / (known + _PRIOR_WEIGHT)
        base = min(max(float(base), 0.0), float(y / x))
        return base, float(y - base * x)
