"""Text from a model with a memory, token by token."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spalm.generation.answer import Chunk, FinishReason, GeneratedToken
from spalm.generation.citations import citations_of, cited_sources, memory_share
from spalm.generation.decoder import Decoder, EncodedTokens, predict_together
from spalm.generation.detokenise import IncrementalDetokeniser
from spalm.generation.drafts import Drafter
from spalm.generation.sampling import Sampling, pick_token, random_generator
from spalm.semiparametric import CombinedPrediction, Retrieved

_LONGEST_PIECE = 256
"""Number of tokens of a prompt that are read in one step."""


@dataclass(frozen=True)
class GenerationOptions:
    """How tokens are generated, and what is returned besides them."""

    sampling: Sampling
    cite: bool = False
    """Whether sources are looked up."""
    likely: int = 0
    """Number of the likeliest tokens to name beside each token."""
    draft: bool = False
    """Whether the next tokens are guessed from the memory, which saves passes of the network and changes no token."""


class Generation:
    """An answer in progress. Each step reads tokens that it has not read yet, and picks the next ones.

    A draft is a guess of the tokens that follow. It is read with the last token, and kept as far as the tokens that are
    picked are those of the draft; so it never changes what is generated.
    """

    def __init__(self, decoder: Decoder, last: int, options: GenerationOptions, unread: Sequence[int] = ()):
        """`last` is the last token of the prompt, `unread` its tokens that the decoder has yet to read."""
        model = decoder.model
        self.decoder, self.options, self.last = decoder, options, last
        self._unread, self._draft = list(unread), list[int]()
        self._detokeniser = IncrementalDetokeniser(model.tokeniser, [last])
        self._random = random_generator(options.sampling, model.device)
        drafts = options.draft and decoder.use_memory and decoder.at_once > 1 and decoder.can_shorten
        self._drafter = Drafter(model.store, model.pass_times, model.draft_record) if drafts else None
        self._picked = 0
        self.finished = False
        """Whether the last token has been picked."""

    def next_piece(self, longest: int) -> list[int]:
        """Returns the tokens to read next, of a prompt at most `longest`, and counts them as read."""
        longest = max(longest, 1 + len(self._draft))  # a draft is read at once with the token before it
        piece, self._unread = self._unread[:longest], self._unread[longest:]
        return piece

    @property
    def predicts(self) -> int:
        """Number of the last positions read whose predictions are needed; 0 while tokens are left to read."""
        return 0 if self._unread else 1 + len(self._draft)

    def pick(self, combined: CombinedPrediction, retrieved: Retrieved) -> list[GeneratedToken]:
        """Returns the next token, and those after it as far as the draft was right; takes back what was wrong of it."""
        found = []
        for row in range(1 + len(self._draft)):
            here = slice(row, row + 1)
            found.append(self._pick_one(combined[here], retrieved[here]))
            if self.finished or row == len(self._draft) or found[-1].id != self._draft[row]:
                break
        self.last = found[-1].id
        wrong = len(self._draft) - (len(found) - 1)
        if wrong and not self.finished:
            self.decoder.take_back(wrong)
        if self._drafter is not None:
            if self._draft:
                self._drafter.learn(len(found) - 1, failed=wrong > 0)
            most = self.options.sampling.max_tokens - self._picked - 1
            self._draft = self._drafter.propose(combined[here], retrieved[here], self.last, most)
        self._unread = [self.last, *self._draft]
        return found

    def _pick_one(self, combined: CombinedPrediction, retrieved: Retrieved) -> GeneratedToken:
        """Returns a token picked from the distribution of one position."""
        model, options = self.decoder.model, self.options
        log_probabilities = combined.log_probabilities[0]
        token = pick_token(log_probabilities, options.sampling, self._random)
        self._picked += 1
        ends, last = token in model.tokeniser.end_tokens, self._picked == options.sampling.max_tokens
        reason: FinishReason | None = "stop" if ends else "length" if last else None
        self.finished = reason is not None
        text = "" if ends else self._detokeniser.add(token)
        share = memory_share(combined, retrieved, token)
        cited = options.cite and share > 0
        best = log_probabilities.topk(min(options.likely, len(log_probabilities)))
        return GeneratedToken(
            id=token,
            text=text + self._detokeniser.rest() if reason else text,
            log_probability=float(log_probabilities[token]),
            memory_share=share,
            sources=cited_sources(model.store.entries(), combined, retrieved, token) if cited else [],
            likely=list(zip(best.indices.tolist(), best.values.tolist())),
            finish_reason=reason,
        )


def advance(answers: Sequence[Generation], longest: int = _LONGEST_PIECE) -> list[list[GeneratedToken]]:
    """Makes one step of several answers of one model: one pass of the network, one search of the memory.

    Returns the tokens that were picked for each; none while a prompt is being read, `longest` tokens at a time.
    """
    begun = time.perf_counter()
    pieces = [answer.next_piece(longest) for answer in answers]
    decoders = [answer.decoder for answer in answers]
    encoded = decoders[0].feed_together(decoders, pieces)
    asking = {number: answer for number, answer in enumerate(answers) if answer.predicts}
    predicted = predict_together(
        [(answer.decoder, encoded[number][-answer.predicts :], answer.last) for number, answer in asking.items()]
    )
    found: list[list[GeneratedToken]] = [[] for _ in answers]
    for (number, answer), prediction in zip(asking.items(), predicted):
        found[number] = answer.pick(*prediction)
    if len(answers) == len(asking) == 1:
        answers[0].decoder.model.pass_times.note(len(pieces[0]), time.perf_counter() - begun)
    return found


def generate_tokens(
    decoder: Decoder, encoded: EncodedTokens, last: int, options: GenerationOptions
) -> Iterator[GeneratedToken]:
    """Yields the tokens that continue what a decoder has read.

    `encoded` is the decoder's output at its last position, `last` the token that it read there.
    """
    answer = Generation(decoder, last, options)
    yield from answer.pick(*decoder.predict(encoded, last))
    while not answer.finished:
        yield from advance([answer])[0]


def stream_chunks(decoder: Decoder, encoded: EncodedTokens, last: int, options: GenerationOptions) -> Iterator[Chunk]:
    """Yields the answer in chunks, cut at stop texts; the last chunk has the citations if they are wanted."""
    shown: list[GeneratedToken] = []
    for chunk in cut_at_stops(generate_tokens(decoder, encoded, last, options), options.sampling.stop):
        shown += chunk.tokens
        ended = options.cite and chunk.finish_reason is not None
        yield replace(chunk, citations=citations_of(shown)) if ended else chunk


def cut_at_stops(tokens: Iterator[GeneratedToken], stops: list[str]) -> Iterator[Chunk]:
    """Yields an answer in chunks and cuts it where the first stop text begins.

    Each token yields a chunk with the text that is certain by then. Text that may be the beginning of a stop text is
    held back, with its tokens, until that is decided.
    """
    text, shown = "", 0
    held: list[tuple[int, GeneratedToken]] = []
    for token in tokens:
        held.append((len(text), token))
        text += token.text
        found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if found:
            end = min(found)
            cut = [replace(one, text=one.text[: end - begin]) for begin, one in held if begin < end]
            yield Chunk(text[shown:end], cut, "stop", generated=1)
            return
        overlap = 0 if token.finish_reason else max((_overlap(text, stop) for stop in stops), default=0)
        certain = len(text) - overlap
        sure = [one for begin, one in held if token.finish_reason or begin < certain >= begin + len(one.text)]
        held = held[len(sure) :]
        yield Chunk(text[shown:certain], sure, token.finish_reason, generated=1)
        shown = certain


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
