"""Drafts: guesses of the next tokens, taken from what followed the memory's best proposal.

If the memory proposed the last token strongly, what comes next often is what came next there. One pass over the last
token and the draft predicts the token after each of them; the draft is kept as far as it is what is picked anyway, so
the text does not change. A pass over more tokens takes longer, though: a draft is only as long as pays by the times of
the passes so far and by how often drafts were right after proposals of that strength.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from spalm.generation.answer import GeneratedToken
from spalm.memory import MISSING, Memory
from spalm.semiparametric import CombinedPrediction, Retrieved

LONGEST_DRAFT = 12
"""Highest number of tokens of a draft."""
_STRENGTHS = (0.5, 0.8, 0.95)
"""Shares of a token's probability that came from its best proposal, which divide proposals into classes."""
_PRIOR_RIGHT, _PRIOR_TOKENS = 0.6, 4.0
"""Share of draft tokens that are right before any was tried, and the number of tokens that this counts for."""
_PRIOR_COST = 0.1
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
_LEAST_GAIN = 1.1
"""Factor by which a draft must be expected to raise the speed."""


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
        if self._sums[0]:
            base, each = self._line()
            seconds = min(seconds, _SURPRISE * (base + each * tokens))
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


@dataclass
class DraftRecord:
    """How often draft tokens were right, by the strength of the proposal that they followed, for one model."""

    right: np.ndarray = field(default_factory=lambda: np.full(1 + len(_STRENGTHS), _PRIOR_RIGHT * _PRIOR_TOKENS))
    tried: np.ndarray = field(default_factory=lambda: np.full(1 + len(_STRENGTHS), _PRIOR_TOKENS))

    def note(self, strength: int, right: int, *, failed: bool) -> None:
        """Adds a draft whose first tokens were right; `failed`: the one after them was not."""
        self.right[strength] += right
        self.tried[strength] += right + failed

    @property
    def chances(self) -> Float[np.ndarray, "strengths"]:
        """The chance that a draft token is right if those before it are."""
        return self.right / self.tried


class Drafter:
    """Makes the drafts of one answer."""

    def __init__(self, memory: Memory, times: PassTimes, record: DraftRecord):
        self._memory, self._times, self._record = memory, times, record
        self._strength = 0

    def learn(self, right: int, *, failed: bool) -> None:
        """Notes how far the last draft was right."""
        self._record.note(self._strength, right, failed=failed)

    def propose(self, combined: CombinedPrediction, retrieved: Retrieved, picked: GeneratedToken) -> list[int]:
        """Returns what may follow a token, which was picked from the first position of a prediction."""
        if self._times.next_is_control:
            return []
        lengths = self.lengths_that_pay()
        if not lengths[: 1 + _class_of(picked.memory_share)].any():  # no proposal is stronger than all together
            return []
        if (best := _best_proposal(combined, retrieved, picked.id)) is None:
            return []
        entry, strength = best
        self._strength = _class_of(strength)
        length = int(lengths[self._strength])
        return continuation(self._memory, entry, length) if length else []

    def lengths_that_pay(self) -> Int[np.ndarray, "strengths"]:
        """Returns the length with most expected tokens, of all answers, in the time of a pass, after proposals of each
        strength; 0 where no draft pays."""
        at_least = self._times.others + 1
        lengths = np.arange(LONGEST_DRAFT + 1)
        expected = at_least + np.cumsum(self._record.chances[:, None] ** lengths, axis=1) - 1
        gains = expected / self._times.seconds(at_least + lengths)
        return np.where(gains.max(1) > _LEAST_GAIN * gains[:, 0], gains.argmax(1), 0)


def _class_of(strength: float) -> int:
    """Returns the number of the class that a proposal belongs to."""
    return int(np.searchsorted(_STRENGTHS, strength))


def _best_proposal(combined: CombinedPrediction, retrieved: Retrieved, token: int) -> tuple[int, float] | None:
    """Returns the entry that proposed a token most strongly, and its share of the token's probability."""
    probability = float(combined.log_probabilities[0, token].exp())
    memory = 1 - float(combined.network_share[0])
    best, weight = MISSING, 0.0
    count = min(combined.neighbour_weights.shape[1], retrieved.ids.shape[1])
    found = [(retrieved.ids[0, :count], retrieved.tokens[0, :count], combined.neighbour_weights[0, :count])]
    if combined.match_weights is not None and retrieved.matched is not None:
        matched = retrieved.matched
        found.append((matched.ids[0].flatten(), matched.tokens[0].flatten(), combined.match_weights[0].flatten()))
    for ids, tokens, weights in found:
        own = weights * (tokens == token)
        if own.numel() and float(own.max()) > weight:
            best, weight = int(ids[own.argmax()]), float(own.sum())
    return None if best == MISSING else (best, min(1.0, memory * weight / max(probability, 1e-30)))


def continuation(memory: Memory, entry: int, length: int) -> list[int]:
    """Returns the tokens that follow the token of an entry in its document, at most `length`."""
    entries = memory.entries()
    documents = entries.live_documents
    index = int(documents.index_of(np.array(entry)))
    if index == MISSING:
        return []
    end = int(documents.first_ids[index] + documents.entries[index])
    return entries.tokens_of(np.arange(entry + 1, min(entry + 1 + length, end))).tolist()
