"""Drafts: guesses of the next tokens, taken from what followed the memory's best proposal.

If the memory proposed the last token strongly, what comes next often is what came next there. One pass over the last
token and the draft predicts the token after each of them; the draft is kept as far as it is what is picked anyway, so
the text does not change. A pass over more tokens takes longer, though: a draft is only as long as pays by the times of
the passes so far and by how often drafts were right after proposals of that strength.
"""

from dataclasses import dataclass, field

import numpy as np

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
_MEMORY = 0.9
"""Weight of what is known beside what is measured now."""


@dataclass
class PassTimes:
    """Times of passes by their numbers of tokens, for one model; averages that follow the machine's load."""

    seconds: dict[int, float] = field(default_factory=dict)
    others: int = 0
    """Number of tokens that other answers read in the same pass."""

    def note(self, tokens: int, seconds: float) -> None:
        """Adds the time of one pass."""
        known = self.seconds.get(tokens)
        self.seconds[tokens] = seconds if known is None else _MEMORY * known + (1 - _MEMORY) * seconds

    def cost(self, tokens: int) -> float:
        """Returns the time of a pass over this many tokens, in passes over one."""
        one = self.seconds.get(1)
        if one is None:
            return 1 + _PRIOR_COST * (tokens - 1)
        known = sorted(self.seconds)
        if tokens > known[-1]:  # as if further tokens cost what the last known ones did
            slope = max(0.0, self.seconds[known[-1]] / one - 1) / max(1, known[-1] - 1) or _PRIOR_COST
            return max(1.0, self.seconds[known[-1]] / one) + slope * (tokens - known[-1])
        return max(1.0, float(np.interp(tokens, known, [self.seconds[each] / one for each in known])))


@dataclass
class DraftRecord:
    """How often draft tokens were right, by the strength of the proposal that they followed, for one model."""

    right: np.ndarray = field(default_factory=lambda: np.full(1 + len(_STRENGTHS), _PRIOR_RIGHT * _PRIOR_TOKENS))
    tried: np.ndarray = field(default_factory=lambda: np.full(1 + len(_STRENGTHS), _PRIOR_TOKENS))

    def note(self, strength: int, right: int, *, failed: bool) -> None:
        """Adds a draft whose first tokens were right; `failed`: the one after them was not."""
        self.right[strength] += right
        self.tried[strength] += right + failed

    def chance(self, strength: int) -> float:
        """Returns the chance that a draft token is right if those before it are."""
        return float(self.right[strength] / self.tried[strength])


class Drafter:
    """Makes the drafts of one answer."""

    def __init__(self, memory: Memory, times: PassTimes, record: DraftRecord):
        self._memory, self._times, self._record = memory, times, record
        self._strength = 0

    def learn(self, right: int, *, failed: bool) -> None:
        """Notes how far the last draft was right."""
        self._record.note(self._strength, right, failed=failed)

    def propose(self, combined: CombinedPrediction, retrieved: Retrieved, token: int, most: int) -> list[int]:
        """Returns what may follow `token`, which was picked from the first position of a prediction."""
        if (best := _best_proposal(combined, retrieved, token)) is None:
            return []
        entry, strength = best
        self._strength = int(np.searchsorted(_STRENGTHS, strength))
        length = min(self._length_that_pays(), most)
        return continuation(self._memory, entry, length) if length else []

    def _length_that_pays(self) -> int:
        """Returns the length with most expected tokens, of all answers, in the time of a pass; 0 if no draft pays."""
        chance = self._record.chance(self._strength)
        at_least = self._times.others + 1
        expected = at_least + np.cumsum(chance ** np.arange(LONGEST_DRAFT + 1)) - 1
        gains = [tokens / self._times.cost(at_least + length) for length, tokens in enumerate(expected)]
        return int(np.argmax(gains))


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
