"""Text from a model with a memory, token by token, for one text or for several side by side."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor

from spalm.generation.answer import FinishReason, GeneratedToken
from spalm.generation.citations import TOOK_PART, FollowedPlace, cited_sources, memory_share
from spalm.generation.decoding.decoder import Decoder, predict_together
from spalm.generation.decoding.detokenise import IncrementalDetokeniser
from spalm.generation.decoding.drafts import NO_DRAFT, CheckedDraft, Drafter
from spalm.generation.decoding.sampling import Sampling, pick_token, random_generator
from spalm.memory import MISSING
from spalm.semiparametric import CombinedPrediction, Retrieved

if TYPE_CHECKING:
    from spalm.generation.model import Model

LONGEST_PIECE = 512
"""Number of tokens of prompts that are read in one step if no other answer waits for its next token."""
_PIECE_BESIDE_OTHERS = 128
"""Number of tokens of prompts that are read in one step if other answers wait for their next tokens."""


@dataclass(frozen=True)
class GenerationOptions:
    """How tokens are generated, and what is returned besides them."""

    sampling: Sampling | None
    """How tokens are picked; None: the prompt is read, and nothing is generated."""
    cite: bool = False
    """Whether sources are looked up."""
    likely: int = 0
    """Number of the likeliest tokens to name beside each token."""
    draft: bool = False
    """Whether the next tokens are guessed from the memory, which saves passes and changes no token but for rounding."""
    score_prompt: bool = False
    """Whether the tokens of the prompt are returned too, with their log-probabilities."""


@dataclass
class Step:
    """Tokens that one step of an answer gave."""

    prompt: list[GeneratedToken] = field(default_factory=list)
    """Tokens of the prompt, if they are scored. They have no text."""
    picked: list[GeneratedToken] = field(default_factory=list)
    """Tokens that were generated."""
    error: Exception | None = None
    """What went wrong with this answer alone."""
    draft: CheckedDraft | None = None
    """How far the draft was right, if there was one."""


class Generation:
    """An answer in progress. Each step reads tokens that it has not read yet, and picks the next ones.

    A draft is a guess of the tokens that follow. It is read with the last token, and kept as far as the tokens that are
    picked are those of the draft; so it never changes what is generated.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int], options: GenerationOptions):
        """`decoder` may have read a beginning of the prompt already, but not all of it."""
        model = decoder.model
        self.decoder, self.options = decoder, options
        self._prompt, self._unread = list(prompt), list(prompt[len(decoder) :])
        self._draft = NO_DRAFT
        self._place = FollowedPlace()
        self._last = prompt[-1]
        self._picked = 0
        self._detokeniser = IncrementalDetokeniser(model.tokeniser, [self._last])
        self._random = None if options.sampling is None else random_generator(options.sampling, model.device)
        drafts = options.draft and decoder.at_once > 1 and decoder.can_shorten
        self._drafter = None
        if drafts and decoder.memories is not None:
            self._drafter = Drafter(decoder.memories, model.pass_times, model.draft_record)
        self.finished = False
        """Whether the last token has been picked."""

    @property
    def reads_prompt(self) -> bool:
        """Whether tokens of the prompt are left to read."""
        return self._picked == 0

    def next_piece(self, longest: int) -> list[int]:
        """Returns the tokens to read next, of a prompt at most `longest`, and counts them as read."""
        if not self.reads_prompt:
            longest = len(self._unread)  # a draft is read at once with the token before it
        elif self.options.score_prompt:
            longest = min(longest, self.decoder.at_once)
        piece, self._unread = self._unread[:longest], self._unread[longest:]
        return piece

    def predictions_of(self, piece: Sequence[int]) -> int:
        """Returns the number of its last positions whose predictions are needed once a piece has been read."""
        if self.reads_prompt and self.options.score_prompt:
            return len(piece)
        if self._unread or self.options.sampling is None:
            return 0
        return 1 + len(self._draft.tokens)

    @property
    def last_read(self) -> int:
        """The last token that was read."""
        return self._prompt[-1 - len(self._unread)] if self.reads_prompt else self._last

    def take(self, combined: CombinedPrediction | None, retrieved: Retrieved | None) -> Step:
        """Returns the tokens that follow from the predictions of a step; None if it needed none."""
        step = Step()
        if combined is not None and retrieved is not None:
            rows = len(combined.log_probabilities)
            if self.reads_prompt and self.options.score_prompt:
                step.prompt = self._score_prompt(combined)
                combined, retrieved = combined[rows - 1 :], retrieved[rows - 1 :]
            if not self._unread and self.options.sampling is not None:
                self._pick(combined, retrieved, self.options.sampling, step=step)
        self.finished = self.finished or (self.options.sampling is None and not self._unread)
        return step

    def _score_prompt(self, combined: CombinedPrediction) -> list[GeneratedToken]:
        """Returns tokens of the prompt with the log-probabilities that the positions before them gave."""
        rows = combined.log_probabilities
        end = len(self._prompt) - len(self._unread)
        first = end - len(rows) + 1
        targets = self._prompt[first : end + 1]
        best = rows.topk(min(self.options.likely, rows.shape[1]))
        likely = [list(zip(*pair)) for pair in zip(best.indices.tolist(), best.values.tolist())]
        scored = [
            GeneratedToken(token, "", float(rows[row, token]), likely=likely[row]) for row, token in enumerate(targets)
        ]
        return scored if first > 1 else [GeneratedToken(self._prompt[0], "", None), *scored]

    def _pick(self, combined: CombinedPrediction, retrieved: Retrieved, sampling: Sampling, *, step: Step) -> None:
        """Picks the next token, and those after it as far as the draft was right; takes back what was wrong of it."""
        draft, found = self._draft, step.picked
        for row in range(1 + len(draft.tokens)):
            here = slice(row, row + 1)
            guess = draft.tokens[row] if row < len(draft.tokens) else None
            found.append(self._pick_one(combined[here], retrieved[here], sampling, guess=guess))
            if self.finished or found[-1].id != guess:
                break
        self._last = found[-1].id
        wrong = len(draft.tokens) - (len(found) - 1)
        if wrong:
            self.decoder.take_back(wrong)
        if draft.tokens:
            step.draft = CheckedDraft(draft.kind, len(draft.tokens), sum(token.drafted for token in found))
        self._draft = NO_DRAFT
        if self._drafter is not None and not self.finished:
            most = sampling.max_tokens - self._picked - 1
            self._draft = self._drafter.propose(self._place, found[-1].memory_share, most)
        self._unread = [self._last, *self._draft.tokens]

    def _pick_one(
        self, combined: CombinedPrediction, retrieved: Retrieved, sampling: Sampling, *, guess: int | None
    ) -> GeneratedToken:
        """Returns a token picked from the distribution of one position; `guess` is what the draft has there."""
        model, options = self.decoder.model, self.options
        log_probabilities = combined.log_probabilities[0]
        assert self._random is not None
        token = pick_token(log_probabilities, sampling, self._random)
        self._picked += 1
        ends, last = token in model.tokeniser.end_tokens, self._picked == sampling.max_tokens
        reason: FinishReason | None = "stop" if ends else "length" if last else None
        self.finished = reason is not None
        text = "" if ends else self._detokeniser.add(token)
        memories = self.decoder.memories
        share = 0.0 if memories is None else memory_share(combined, retrieved, token)
        followed = self._follow(combined, retrieved, token, share=share)
        sources = []
        if memories is not None and options.cite and share > 0:
            sources = cited_sources(memories, combined, retrieved, token=token, followed=followed)
        return GeneratedToken(
            id=token,
            text=text + self._detokeniser.rest() if reason else text,
            log_probability=float(log_probabilities[token]),
            memory_share=share,
            sources=sources,
            continues=followed != MISSING,
            drafted=token == guess,
            likely=_likeliest(log_probabilities, options.likely),
            finish_reason=reason,
        )

    def _follow(self, combined: CombinedPrediction, retrieved: Retrieved, token: int, *, share: float) -> int:
        """Returns the token's entry in the document that the answer follows; MISSING if it is not there."""
        memories = self.decoder.memories
        if share <= TOOK_PART or memories is None:
            self._place = FollowedPlace()
        elif self.options.cite or self._drafter is not None:
            return self._place.advance(memories.entries(), combined, retrieved, token=token)
        return MISSING


def _likeliest(log_probabilities: Float[Tensor, "vocabulary"], count: int) -> list[tuple[int, float]]:
    """Returns the likeliest tokens and their log-probabilities."""
    if not count:
        return []
    best = log_probabilities.topk(min(count, len(log_probabilities)))
    return list(zip(best.indices.tolist(), best.values.tolist()))


def advance(answers: Sequence[Generation], longest: int | None = None) -> list[Step]:
    """Makes one step of several answers of one model: one pass of the network, one search of the memory.

    Prompts are read in pieces, `longest` tokens in one step, the first prompts first; by default fewer if other answers
    wait for their next tokens.
    """
    begun = time.perf_counter()
    if longest is None:
        longest = LONGEST_PIECE if all(answer.reads_prompt for answer in answers) else _PIECE_BESIDE_OTHERS
    stepping, pieces = _pieces(answers, longest)
    needed = [answer.predictions_of(piece) for answer, piece in zip(stepping, pieces)]
    decoders = [answer.decoder for answer in stepping]
    times = decoders[0].model.pass_times
    times.others = len(stepping) - 1
    encoded = decoders[0].feed_together(decoders, pieces, needed)
    asking = [number for number, count in enumerate(needed) if count]
    predicted = predict_together([(decoders[number], encoded[number], stepping[number].last_read) for number in asking])
    predictions = dict(zip(asking, predicted))
    steps = {id(answer): _taken(answer, predictions.get(number)) for number, answer in enumerate(stepping)}
    if sum(needed) == sum(map(len, pieces)):
        note_times(decoders[0].model, list(steps.values()), sum(needed), seconds=time.perf_counter() - begun)
    return [steps.get(id(answer), Step()) for answer in answers]


def _taken(answer: Generation, prediction: tuple[CombinedPrediction, Retrieved] | None) -> Step:
    """Returns what follows from a prediction for one answer; an error of it does not concern the others."""
    try:
        return answer.take(*prediction or (None, None))
    except Exception as error:
        return Step(error=error)


def note_times(model: "Model", steps: list[Step], tokens: int, *, seconds: float) -> None:
    """Notes how long a pass over so many tokens took, and what its drafts cost and saved."""
    checked = [step.draft for step in steps if step.draft is not None]
    if checked:
        without = float(model.pass_times.seconds(np.array([len(steps)]))[0])
        seconds = min(seconds, model.pass_times.longest(tokens))
        model.draft_record.note(checked, seconds - without, without / len(steps))
    model.pass_times.note(tokens, seconds)


def _pieces(answers: Sequence[Generation], longest: int) -> tuple[list[Generation], list[list[int]]]:
    """Returns the answers that make a step, and what each of them reads; prompts share `longest` tokens."""
    stepping, pieces = [], []
    for answer in answers:
        if answer.reads_prompt and longest <= 0:
            continue
        piece = answer.next_piece(longest)
        longest -= len(piece) if answer.reads_prompt else 0
        stepping.append(answer)
        pieces.append(piece)
    return stepping, pieces


def generate_tokens(decoder: Decoder, prompt: Sequence[int], options: GenerationOptions) -> Iterator[GeneratedToken]:
    """Yields the tokens that continue a prompt, of which the decoder may have read a beginning."""
    answer = Generation(decoder, prompt, options)
    while not answer.finished:
        (step,) = advance([answer])
        if step.error is not None:
            raise step.error
        yield from step.picked
