"""Answers that are generated side by side: a step is one pass of the network and one search of the memory for all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spalm.generation.answer import Chunk, GeneratedToken
from spalm.generation.citations import citations_of
from spalm.generation.decoding.decoder import Decoder
from spalm.generation.decoding.generate import Generation, GenerationOptions, Step, advance
from spalm.generation.decoding.stop_texts import StopTexts

if TYPE_CHECKING:
    from spalm.generation.model import Model


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


class RunningAnswer:
    """An answer in progress, in chunks: cut at stop texts, the last with the citations if they are wanted."""

    def __init__(self, request: AnswerRequest, decoder: Decoder):
        self.request = request
        self.generation = Generation(decoder, request.prompt, request.options)
        sampling = request.options.sampling
        self._stops = StopTexts([] if sampling is None else sampling.stop)
        self._shown: list[GeneratedToken] = []
        self._echoed = 0
        self.finished = False
        """Whether the last chunk was returned."""

    def chunks(self, step: Step) -> list[Chunk]:
        """Returns the chunks that follow from a step of the generation."""
        found = self._echo(step)
        for token in step.picked:
            chunk = self._stops.add(token)
            self._shown += chunk.tokens
            if chunk.finish_reason is not None:
                self.finished = True
                cited = citations_of(self._shown) if self.request.options.cite else None
                found.append(replace(chunk, citations=cited))
                break
            found.append(chunk)
        if self.generation.finished and not self.finished:
            self.finished = True
            found.append(Chunk(finish_reason="length"))
        choice = self.request.choice
        return [replace(chunk, choice=choice) for chunk in found] if choice else found

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

    What a finished answer has read is kept as long as its slot is not needed: a prompt that begins in the same way is
    then read from there on.
    """

    def __init__(self, model: "Model", slots: int):
        self.slots = slots
        self.running: list[RunningAnswer] = []
        self.reused_tokens = 0
        """Number of tokens of prompts that were not read, because an earlier answer had read them."""
        self._model = model
        self._kept: list[Decoder] = []  # of finished answers, the last used last

    @property
    def has_room(self) -> bool:
        """Whether another answer can be added."""
        return len(self.running) < self.slots

    def add(self, request: AnswerRequest) -> RunningAnswer:
        """Begins an answer."""
        answer = RunningAnswer(request, self._decoder(request))
        self.running.append(answer)
        return answer

    def remove(self, answer: RunningAnswer) -> None:
        """Ends an answer, finished or not."""
        self.running.remove(answer)
        decoder = answer.generation.decoder
        if decoder.can_shorten and len(decoder):
            self._kept.append(decoder)

    def step(self) -> list[tuple[RunningAnswer, list[Chunk]]]:
        """Makes one step of all answers; returns their chunks. Those that are finished leave the batch."""
        answers = list(self.running)
        steps = advance([answer.generation for answer in answers])
        found = [(answer, answer.chunks(step)) for answer, step in zip(answers, steps)]
        for answer in answers:
            if answer.finished:
                self.remove(answer)
        return found

    def clear(self) -> None:
        """Ends all answers, and forgets what finished ones have read."""
        self.running.clear()
        self._kept.clear()

    def _decoder(self, request: AnswerRequest) -> Decoder:
        """Returns a decoder for an answer: the kept one that has read most of the prompt, or a new one."""
        prompt = request.prompt[:-1]  # the last token is always read, for its prediction
        shared = {
            id(decoder): _common_beginning(decoder.tokens, prompt)
            for decoder in self._kept
            if decoder.use_memory == request.use_memory and not request.options.score_prompt
        }
        best = max(self._kept, key=lambda decoder: shared.get(id(decoder), 0), default=None)
        if best is not None and shared.get(id(best), 0):
            self._kept.remove(best)
            self.reused_tokens += shared[id(best)]
            best.take_back(len(best) - shared[id(best)])
            return best
        del self._kept[: max(0, len(self._kept) + len(self.running) + 1 - self.slots)]
        return self._model.decoder(use_memory=request.use_memory)


def _common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of tokens with which both texts begin."""
    count = 0
    for first, second in zip(one, other):
        if first != second:
            break
        count += 1
    return count
