"""Drafts: guesses of the next tokens, taken from a document of the memory that the answer follows.

If the memory proposed the last token, what comes next often is what came next there. One pass over the last token and
the draft predicts the token after each of them; the draft is kept as far as it is what is picked anyway, so the text
does not change. A pass over more tokens takes longer, though: a draft is only as long as pays by the times of the
passes so far and by how often drafts of its kind were right. What drafts of a kind cost and saved is compared with
passes without drafts all the time; a kind that loses is not made for a while.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from spalm.generation.citations import FollowedPlace, continuation
from spalm.generation.decoding.pass_times import PassTimes
from spalm.generation.memories import MemorySelection
from spalm.memory import MISSING, Memory

LONGEST_DRAFT = 12
"""Highest number of tokens of a draft."""
_SUPPORTS = (0.2, 0.5, 0.9)
"""Supports that divide drafts into kinds: the memory's share in the last token, times how far its proposals agree."""
_LENGTHS = (2, 4, 8)
"""Numbers of tokens of the answer that follow the document already, which divide drafts into kinds."""
KINDS = (1 + len(_SUPPORTS)) * (1 + len(_LENGTHS))
"""Number of kinds of drafts."""
_PRIOR_RIGHT, _PRIOR_TOKENS = np.repeat((0.3, 0.5, 0.75, 0.9), 1 + len(_LENGTHS)), 4.0
"""Share of draft tokens that are right before any was tried, by kind, and the number of tokens that this counts for."""
_LEAST_GAIN = 1.1
"""Factor by which a draft must be expected to raise the speed."""
_MEMORY = 0.97
"""Factor by which the weight of a draft falls with each later one of its kind."""
_LEAST_TRIED = 2.5
"""Weight of the drafts of a kind from which on it is judged; the last one has 1."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
"""Number of chances to make a draft that are passed over after a kind has lost; it doubles each time up to the last."""


@dataclass(frozen=True)
class Draft:
    """A guess of the next tokens."""

    tokens: list[int]
    kind: int
    """Number of its kind."""


NO_DRAFT = Draft([], 0)


@dataclass(frozen=True)
class CheckedDraft:
    """How far a draft was right."""

    kind: int
    tokens: int
    """Number of its tokens."""
    right: int
    """Number of its first tokens that were right."""


@dataclass
class DraftRecord:
    """How often drafts of each kind were right, and the seconds that they cost and saved, for one model."""

    right: np.ndarray = field(default_factory=lambda: _PRIOR_RIGHT * _PRIOR_TOKENS)
    tried: np.ndarray = field(default_factory=lambda: np.full(KINDS, _PRIOR_TOKENS))
    balance: np.ndarray = field(default_factory=lambda: np.zeros((KINDS, 3)))
    """Number of drafts of each kind, seconds that they added to passes, and seconds of the passes that they saved."""
    pauses: np.ndarray = field(default_factory=lambda: np.zeros((KINDS, 2), np.int64))
    """Number of chances that each kind still passes over, and the length of its last pause."""

    def note(self, drafts: list[CheckedDraft], added: float, saved: float) -> None:
        """Adds the drafts of one pass, which took `added` seconds more with them; each right token saves `saved`."""
        tokens = sum(draft.tokens for draft in drafts)
        for draft in drafts:
            self.right[draft.kind] += draft.right
            self.tried[draft.kind] += draft.right + (draft.right < draft.tokens)
            own = added * draft.tokens / tokens
            self.balance[draft.kind] = _MEMORY * self.balance[draft.kind] + [1, own, saved * draft.right]
            self._judge(draft.kind)

    def _judge(self, kind: int) -> None:
        """Begins a pause of a kind if its drafts cost more than they saved."""
        tried, added, saved = self.balance[kind]
        if tried < _LEAST_TRIED:
            return
        if saved > added:
            self.pauses[kind, 1] = 0
            return
        pause = min(max(_FIRST_PAUSE, 2 * self.pauses[kind, 1]), _LONGEST_PAUSE)
        self.pauses[kind] = pause
        self.balance[kind] = 0

    def passes_over(self, kind: int) -> bool:
        """Counts a chance to make a draft of a kind, and returns whether it is passed over."""
        if not self.pauses[kind, 0]:
            return False
        self.pauses[kind, 0] -= 1
        return True

    @property
    def chances(self) -> Float[np.ndarray, "kinds"]:
        """The chance that a draft token is right if those before it are."""
        return self.right / self.tried


class Drafter:
    """Makes the drafts of one answer."""

    def __init__(self, memories: Memory | MemorySelection, times: PassTimes, record: DraftRecord):
        self._memories, self._times, self._record = memories, times, record

    def propose(self, place: FollowedPlace, share: float, most: int) -> Draft:
        """Returns at most `most` tokens that may follow a token.

        `place` is what the answer follows up to it, `share` that of the memory in its probability.
        """
        if most <= 0 or place.entry == MISSING or self._times.next_is_control:
            return NO_DRAFT
        kind = kind_of(share * place.agreement, place.length)
        if self._record.passes_over(kind):
            return NO_DRAFT
        length = min(most, self.length_that_pays(kind))
        return Draft(continuation(self._memories.entries(), place.entry, length), kind) if length else NO_DRAFT

    def length_that_pays(self, kind: int) -> int:
        """Returns the length with most expected tokens, of all answers, in the time of a pass; 0 if no draft pays."""
        gains = self._gains(self._record.chances[kind])
        best = int(gains.argmax())
        return best if gains[best] > _LEAST_GAIN * gains[0] else 0

    def _gains(self, chance: float) -> Float[np.ndarray, "lengths"]:
        """Returns the expected tokens of all answers in a second, by the length of a draft."""
        answers = self._times.others + 1
        lengths = np.arange(LONGEST_DRAFT + 1)
        expected = answers + np.cumsum(chance**lengths) - 1
        return expected / self._times.seconds(answers + lengths)


def kind_of(support: float, length: int) -> int:
    """Returns the number of the kind of a draft that follows a document after so many tokens of the answer."""
    classes = np.searchsorted(_SUPPORTS, support), np.searchsorted(_LENGTHS, length, side="right")
    return int(classes[0]) * (1 + len(_LENGTHS)) + int(classes[1])
