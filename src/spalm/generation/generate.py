"""Text from a model with a memory, token by token, and where each token comes from.

The memory's part in a token is what it added to its probability: lambda p_kNN(w) / p(w). A token of which more than
half came from the memory was decided by it; such tokens in a row are a span, and its sources are the documents of the
neighbours that proposed them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from spalm.generation.detokenise import Letters
from spalm.generation.model import EncodedTokens, Live
from spalm.memory import Entries
from spalm.semiparametric import CombinedPrediction, Retrieved, advance_neighbours
from spalm.settings import Settings

Finish = Literal["stop", "length"]
"""Why an answer ended: of itself or at a text that stops it; or because it had as many tokens as it may."""
_ROWS = 64
"""Positions that are predicted together."""
_DECIDED = 0.5
"""The memory's part from which on it decided a token."""
_SOURCES = 3
"""Sources named of a span."""


class Sampling(Settings):
    max_tokens: int = Field(default=64, gt=0)
    """Tokens to write at most."""
    temperature: float = Field(default=0.0, ge=0)
    """0: always the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens that have this probability together."""
    top_k: int = Field(default=0, ge=0)
    """Only so many of the likeliest tokens; 0: all."""
    stop: list[str] = []
    """Texts at which it ends; they are not part of the answer."""
    seed: int | None = None
    """Of sampling; none: another each time."""


@dataclass(frozen=True)
class Cited:
    """A place in the memory that spoke for a token."""

    document: str
    offset: int
    weight: float


@dataclass(frozen=True)
class Written:
    """One token of the answer."""

    token: int
    text: str
    """What it adds to the answer; empty while a letter is not complete, and of a token that ends the answer."""
    log_probability: float
    memory: float
    """The memory's part in it."""
    cited: list[Cited] = field(default_factory=list)
    likely: list[tuple[int, float]] = field(default_factory=list)
    finished: Finish | None = None
    """It is the last token."""


@dataclass(frozen=True)
class Part:
    """What has become certain of an answer."""

    text: str
    written: list[Written]
    """The tokens that ended with it."""
    finished: Finish | None = None


@dataclass(frozen=True)
class Span:
    """A part of the answer that the memory decided."""

    start: int
    """In letters of the answer."""
    end: int
    sources: list[Cited]


class Reader:
    """Reads on from where it is, with the memory beside it. Makes one search a token at most."""

    def __init__(self, live: Live, use_memory: bool = True):
        self.live, self.use_memory = live, use_memory
        self._follower = live.follow()
        self._before: Retrieved | None = None

    def feed(self, tokens: Sequence[int]) -> EncodedTokens:
        return self._follower.feed(tokens)

    @property
    def at_once(self) -> int:
        """Positions that may be predicted together: where a policy decides, one rests on what was found before it."""
        return _ROWS if self.live.policy is None or not self.use_memory else 1

    @torch.inference_mode()
    def predict(self, heard: EncodedTokens, last: int) -> tuple[CombinedPrediction, Retrieved]:
        """The distribution after the token `last`, and the neighbours it rests on. Positions come in order."""
        retrieved = self._retrieve(heard, last) if self.use_memory else Retrieved.empty(len(heard.keys))
        retrieved = retrieved.to(self.live.device)
        self._before = retrieved
        return self.live.combiner.combine(self.live.model, heard.hidden, retrieved), retrieved

    def _retrieve(self, heard: EncodedTokens, last: int) -> Retrieved:
        live = self.live
        if live.policy is None or float(live.policy(heard.hidden)) > live.threshold:
            return live.search(heard.keys)
        if self._before is None:
            return Retrieved.empty(1)
        return advance_neighbours(self._before, torch.tensor([last], device=live.device), live.memory.entries())


def generate(
    live: Live,
    prompt: list[int],
    sampling: Sampling,
    cite: bool = False,
    use_memory: bool = True,
    likely: int = 0,
) -> Iterator[Written]:
    """The answer to a prompt, token by token; `likely`: how many of the likeliest tokens to name beside each."""
    reader = Reader(live, use_memory)
    yield from go_on(reader, reader.feed(prompt)[-1:], prompt[-1], sampling, cite, likely)


def go_on(
    reader: Reader, heard: EncodedTokens, last: int, sampling: Sampling, cite: bool = False, likely: int = 0
) -> Iterator[Written]:
    """The same after what a reader has read, which ended with the token `last`."""
    live = reader.live
    letters = Letters(live.tokeniser, [last])
    chance = torch.Generator(device=live.device)
    chance.manual_seed(sampling.seed) if sampling.seed is not None else chance.seed()
    for number in range(1, sampling.max_tokens + 1):
        combined, retrieved = reader.predict(heard, last)
        log_probabilities = combined.log_probabilities[0]
        last = _pick(log_probabilities, sampling, chance)
        ends = last in live.tokeniser.end_tokens
        finished: Finish | None = "stop" if ends else "length" if number == sampling.max_tokens else None
        text = "" if ends else letters.add(last)
        part = _memory_part(combined, retrieved, last)
        best = log_probabilities.topk(min(likely, len(log_probabilities)))
        yield Written(
            last,
            text + letters.rest() if finished else text,
            float(log_probabilities[last]),
            part,
            _cited(live.memory.entries(), combined, retrieved, last) if cite and part > 0 else [],
            list(zip(best.indices.tolist(), best.values.tolist())),
            finished,
        )
        if finished:
            return
        heard = reader.feed([last])


def until(written: Iterator[Written], stops: list[str]) -> Iterator[Part]:
    """Cuts an answer at the first of some texts. With each token comes what is certain by then: what may be the
    beginning of a stop is held back until it is not, and the tokens of it with it."""
    said, shown = "", 0
    held: list[tuple[int, Written]] = []
    for each in written:
        held.append((len(said), each))
        said += each.text
        found = [at for at in (said.find(stop) for stop in stops) if at >= 0]
        if found:
            end = min(found)
            cut = [replace(one, text=one.text[: end - begin]) for begin, one in held if begin < end]
            yield Part(said[shown:end], cut, "stop")
            return
        overlap = 0 if each.finished else max((_overlap(said, stop) for stop in stops), default=0)
        certain = len(said) - overlap
        sure = [one for begin, one in held if each.finished or begin < certain >= begin + len(one.text)]
        held = held[len(sure) :]
        yield Part(said[shown:certain], sure, each.finished)
        shown = certain


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)


def _pick(log_probabilities: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(log_probabilities.argmax())
    scores = log_probabilities / sampling.temperature
    order = scores.sort(descending=True)
    if sampling.top_k:
        order.values[sampling.top_k :] = -torch.inf
    probabilities = order.values.softmax(-1)
    if sampling.top_p < 1:
        probabilities[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = 0
    return int(order.indices[torch.multinomial(probabilities, 1, generator=chance)])


def _memory_part(combined: CombinedPrediction, retrieved: Retrieved, token: int) -> float:
    proposed = sum(weight for _, weight in _proposals(combined, retrieved, token))
    return min(
        1.0, (1 - float(combined.network_share[0])) * proposed / math.exp(float(combined.log_probabilities[0, token]))
    )


def _cited(entries: Entries, combined: CombinedPrediction, retrieved: Retrieved, token: int) -> list[Cited]:
    found = []
    for id, weight in sorted(_proposals(combined, retrieved, token), key=lambda proposal: -proposal[1])[:_SOURCES]:
        source = entries.source(id)
        if source is not None:
            found.append(Cited(source.document, source.offset, weight))
    return found


def _proposals(combined: CombinedPrediction, retrieved: Retrieved, token: int) -> list[tuple[int, float]]:
    """The neighbours that were followed by this token, and their weights."""
    count = min(combined.neighbour_weights.shape[1], retrieved.ids.shape[1])
    hits = (retrieved.tokens[0, :count] == token).nonzero()[:, 0]
    return list(zip(retrieved.ids[0, hits].tolist(), combined.neighbour_weights[0, hits].tolist()))


def spans(written: list[Written]) -> list[Span]:
    """The parts of an answer that the memory decided, with the documents that spoke most for them."""
    found: list[Span] = []
    at = 0
    start: int | None = None
    weights: dict[str, float] = defaultdict(float)
    offsets: dict[str, int] = {}

    def close(end: int) -> None:
        nonlocal start
        if start is not None and end > start:
            best = sorted(weights, key=lambda document: -weights[document])[:_SOURCES]
            found.append(Span(start, end, [Cited(document, offsets[document], weights[document]) for document in best]))
        start = None
        weights.clear()
        offsets.clear()

    for each in written:
        if each.memory > _DECIDED:
            start = at if start is None else start
            for cited in each.cited:
                weights[cited.document] += cited.weight
                offsets.setdefault(cited.document, cited.offset)  # where the part begins there
        else:
            close(at)
        at += len(each.text)
    close(at)
    return found
