"""Answers that are generated side by side: a step is one pass of the network and one search of the memory for all."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from spalm.generation.answer import Chunk, Citation, GeneratedToken
from spalm.generation.citations import citations_of
from spalm.generation.copied import copied_parts, with_copied_parts
from spalm.generation.decoding.decoder import Decoder
from spalm.generation.decoding.generate import Generation, GenerationOptions, Step, advance
from spalm.generation.decoding.stop_texts import StopTexts
from spalm.generation.memories import MemorySelection
from spalm.generation.passages import RankedPassage

if TYPE_CHECKING:
    from spalm.generation.model import Model

_WORTH_COPYING = 32
"""Number of tokens from which on it takes less time to copy what was read than to read it again."""


@dataclass(frozen=True)
class AnswerRequest:
    """One answer that is to be generated."""

    prompt: list[int]
    options: GenerationOptions
    use_memory: bool = True
    echo: list[str] | None = None
    """Texts of the prompt's tokens, if the answer is to begin with them."""
    choice: int = 0
    """Number of the answer among those of its client's request."""
    memories: MemorySelection | None = None
    """Memories that are searched, if any is; None: all that are open."""
    passages: list[RankedPassage] = field(default_factory=list)
    """Passages of the memory that are in the prompt, best first; what is copied from them is cited."""


class RunningAnswer:
    """An answer in progress, in chunks: cut at stop texts, the last with the citations if they are wanted."""

    def __init__(self, request: AnswerRequest, decoder: Decoder):
        self.request = request
        self.start_with(decoder)
        sampling = request.options.sampling
        self._stops = StopTexts([] if sampling is None else sampling.stop)
        self._shown: list[GeneratedToken] = []
        self._echoed = 0
        self.finished = False
        """Whether the last chunk was returned, or the answer failed."""
        self.error: Exception | None = None
        """Why the answer failed."""

    def start_with(self, decoder: Decoder) -> None:
        """Begins the answer with a decoder that may have read a beginning of its prompt."""
        self.generation = Generation(decoder, self.request.prompt, self.request.options)

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Ends the answer, and nothing else, if an exception is raised in the block."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the answer because of an error."""
        traceback.clear_frames(error.__traceback__)  # which would keep what the model has read
        self.finished, self.error = True, error

    def chunks(self, step: Step) -> list[Chunk]:
        """Returns the chunks that follow from a step of the generation."""
        if step.error is not None:
            raise step.error
        found = self._echo(step)
        for token in step.picked:
            chunk = self._stops.add(token)
            self._shown += chunk.tokens
            if chunk.finish_reason is not None:
                self.finished = True
                cited = self._citations() if self.request.options.cite else None
                found.append(replace(chunk, citations=cited))
                break
            found.append(chunk)
        if self.generation.finished and not self.finished:
            self.finished = True
            found.append(Chunk(finish_reason="length"))
        choice = self.request.choice
        return [replace(chunk, choice=choice) for chunk in found] if choice else found

    def _citations(self) -> list[Citation]:
        """Returns the citations of the whole answer: what the memory decided, and what stands in a passage."""
        decided, passages = citations_of(self._shown), self.request.passages
        if not passages:
            return decided
        models, memories = self.generation.decoder.model.models, self.request.memories
        copied = copied_parts(
            "".join(token.text for token in self._shown),
            passages,
            telling=(models.memories.select() if memories is None else memories).tell_something,
            count_tokens=lambda text: len(models.tokeniser.encode([text.encode()])[0]),
        )
        return with_copied_parts(copied, decided)

    def _echo(self, step: Step) -> list[Chunk]:
        """Returns the part of the prompt that is echoed in this step: with its scores, or all of it when it is read."""
        texts = self.request.echo
        if texts is None:
            return []
        if self.request.options.score_prompt:
            begin, self._echoed = self._echoed, self._echoed + len(step.prompt)
            tokens = [replace(token, text=text) for token, text in zip(step.prompt, texts[begin:])]
            return [Chunk("".join(token.text for token in tokens), tokens)] if tokens else []
        if self._echoed or not (step.picked or self.generation.finished):
            return []
        self._echoed = len(texts)
        return [Chunk("".join(texts))]


class AnswerBatch:
    """Answers of one model in progress, at most `slots` at a time.

    What a finished answer has read is kept as long as its slot is not needed. A prompt that begins like another one, of
    a kept answer or of a running one that searches the same memories, is read from there on. If two such prompts arrive
    at once, the second waits until the first has read what both begin with.
    """

    def __init__(self, model: "Model", slots: int):
        self.slots = slots
        self.running: list[RunningAnswer] = []
        self.reused_tokens = 0
        """Number of tokens of prompts that were not read, because another answer had read them."""
        self._model = model
        self._unbegun: list[RunningAnswer] = []  # those of `running` that have no decoder of their own yet
        self._kept: list[Decoder] = []  # of finished answers, the last used last

    @property
    def has_room(self) -> bool:
        """Whether another answer can be added."""
        return len(self.running) < self.slots

    def add(self, request: AnswerRequest) -> RunningAnswer:
        """Adds an answer; it begins with the next step."""
        answer = RunningAnswer(request, self._model.decoder(use_memory=request.use_memory, memories=request.memories))
        self.running.append(answer)
        self._unbegun.append(answer)
        return answer

    def remove(self, answer: RunningAnswer) -> None:
        """Ends an answer, finished or not."""
        self.running.remove(answer)
        if answer in self._unbegun:
            self._unbegun.remove(answer)
            return
        decoder = answer.generation.decoder
        if answer.error is None and decoder.can_shorten and len(decoder):
            self._kept.append(decoder)

    def step(self) -> list[tuple[RunningAnswer, list[Chunk]]]:
        """Makes one step of all answers; returns their chunks. Those that are finished, or failed, leave the batch."""
        answers = list(self.running)
        chunks: dict[int, list[Chunk]] = {id(answer): [] for answer in answers}
        for answer in list(self._unbegun):
            with answer.failing_alone():
                self._begin(answer)
        ready = [answer for answer in answers if answer not in self._unbegun]
        for answer, step in zip(ready, self._advance(ready)):
            with answer.failing_alone():
                chunks[id(answer)] = answer.chunks(step)
        for answer in answers:
            if answer.finished:
                self.remove(answer)
        return [(answer, chunks[id(answer)]) for answer in answers]

    def _advance(self, answers: list[RunningAnswer]) -> list[Step]:
        """Makes a step of answers that have begun. If the pass that they share fails, they all do."""
        try:
            return advance([answer.generation for answer in answers]) if answers else []
        except Exception as error:
            for answer in answers:
                answer.fail(error)
            self._kept.clear()
            return []

    def _begin(self, answer: RunningAnswer) -> None:
        """Begins an answer with what another has read of its prompt, unless more of that is about to be read."""
        source, shared = self._source_of(answer)
        earlier = self.running[: self.running.index(answer)]
        if any(_shared_prompt(each, answer) >= shared + _WORTH_COPYING for each in earlier):
            return
        full = len(self.running) - len(self._unbegun) + len(self._kept) == self.slots
        if source is not None:
            answer.start_with(self._taken_over(source, shared, full=full))
            self.reused_tokens += shared
        elif full:
            del self._kept[0]
        self._unbegun.remove(answer)

    def _source_of(self, answer: RunningAnswer) -> tuple[Decoder | None, int]:
        """Returns the decoder that has read most of an answer's prompt, and how much; None and 0 if that is too little.

        It searches the same memories: with passages of others in a prompt, their readers must not be found out by time.
        """
        request, own = answer.request, answer.generation.decoder
        running = [answer.generation.decoder for answer in self.running if answer not in self._unbegun]
        shared, best = 0, None
        for decoder in [*running, *self._kept]:
            if decoder.can_shorten and decoder.searches_as(own):
                common = _common_beginning(decoder.tokens, _sharable(request))
                if common >= max(shared, _WORTH_COPYING):
                    shared, best = common, decoder
        return best, shared

    def _taken_over(self, source: Decoder, shared: int, *, full: bool) -> Decoder:
        """Returns a decoder that has read what another has read, up to its first `shared` tokens.

        It is the other itself if that is kept, and has hardly read more or must make room; else a copy.
        """
        kept = source in self._kept
        if kept and (len(source) - shared < _WORTH_COPYING or (full and source is self._kept[0])):
            self._kept.remove(source)
            decoder = source
        else:
            if full:
                del self._kept[0]
            if kept:  # it was used last
                self._kept.remove(source)
                self._kept.append(source)
            decoder = source.copied()
        decoder.take_back(len(decoder) - shared)
        return decoder


def _sharable(request: AnswerRequest) -> list[int]:
    """Returns the part of a prompt that need not be read if another answer has: not the last token, which predicts."""
    return [] if request.options.score_prompt else request.prompt[:-1]


def _shared_prompt(answer: RunningAnswer, later: RunningAnswer) -> int:
    """Returns how much of a later answer's prompt will have been read when one has read its own; 0 when it has."""
    generation = answer.generation
    if not generation.reads_prompt or not generation.decoder.can_shorten or answer.finished:
        return 0
    if not generation.decoder.searches_as(later.generation.decoder):
        return 0
    return _common_beginning(answer.request.prompt, _sharable(later.request))


def _common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of tokens with which both texts begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differing[0]) if len(differing) else length
