"""Completions: a request becomes an order, an order becomes pieces of answers, and pieces take OpenAI's form.

Pieces are the same whether they are sent one by one or put together at the end.
"""

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spalm.corpus.tokeniser import Tokeniser
from spalm.generation.detokenise import pieces
from spalm.generation.generate import Finish, Reader, Sampling, Span, Written, go_on, spans, until
from spalm.generation.model import EncodedTokens, Live

_LEAST = -9999.0
"""Stands for log 0, which JSON cannot say."""


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    texts: list[str]
    """What each token adds to the text that is echoed."""

    @classmethod
    def of(cls, tokeniser: Tokeniser, given: str | list[int]) -> "Prompt":
        """Of a text, special tokens that the model is given before it are no part."""
        tokens = tokeniser.prompt(given) if isinstance(given, str) else given or [tokeniser.start]
        return cls(
            tokens, _behind(given, pieces(tokeniser, tokens)) if isinstance(given, str) else pieces(tokeniser, tokens)
        )


def _behind(text: str, texts: list[str]) -> list[str]:
    """Without what stands before the text. If the text cannot be found in it, all of what was read."""
    whole = "".join(texts)
    before = len(whole) - len(text) if whole.endswith(text) else 0
    found = []
    for each in texts:
        found.append(each[before:])
        before = max(0, before - len(each))
    return found


@dataclass(frozen=True)
class Order:
    """What is to be done."""

    prompts: list[Prompt]
    sampling: Sampling | None
    """None: nothing is to be written."""
    each: int = 1
    """Answers to each prompt."""
    echo: bool = False
    likely: int | None = None
    """Likely tokens named beside each; None: no log-probabilities are wanted."""
    use_memory: bool = True
    cite: bool = False

    @property
    def read(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)


@dataclass(frozen=True)
class Token:
    """A token of a prompt or of an answer, and how likely it was; None of the first of a text."""

    id: int
    text: str
    log_probability: float | None
    likely: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """What one step adds to one of the answers."""

    answer: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    written: int = 0
    """Tokens that were written for it, cut off or not."""
    finished: Finish | None = None
    citations: list[Span] | None = None


def fill(live: Live, order: Order) -> Iterator[Piece]:
    """All answers, one after the other, in small steps."""
    number = 0
    for prompt in order.prompts:
        for which in range(order.each):
            yield from (replace(piece, answer=number) for piece in _answer(live, order, prompt, which))
            number += 1


def _answer(live: Live, order: Order, prompt: Prompt, which: int) -> Iterator[Piece]:
    reader = Reader(live, order.use_memory)
    heard = reader.feed(prompt.tokens)
    if order.echo and order.likely is not None:
        for tokens in score(reader, heard, prompt, order.likely):
            yield Piece(0, "".join(token.text for token in tokens), tokens)
    elif order.echo:
        yield Piece(0, "".join(prompt.texts))
    if order.sampling is None:
        yield Piece(0, finished="length")
        return
    sampling = order.sampling
    if sampling.seed is not None:  # several answers to a prompt differ, and come again
        sampling = sampling.model_copy(update={"seed": sampling.seed + which})
    written: list[Written] = []
    answer = go_on(reader, heard[-1:], prompt.tokens[-1], sampling, order.cite, order.likely or 0)
    for part in until(answer, sampling.stop):
        written += part.written
        tokens = [Token(each.token, each.text, each.log_probability, each.likely) for each in part.written]
        cited = spans(written) if order.cite and part.finished else None
        yield Piece(0, part.text, tokens, 1, part.finished, cited)


@torch.inference_mode()
def score(reader: Reader, heard: EncodedTokens, prompt: Prompt, likely: int) -> Iterator[list[Token]]:
    """log p of every token of a prompt that has been read; none of the first, which nothing precedes."""
    tokens, texts = prompt.tokens, prompt.texts
    yield [Token(tokens[0], texts[0], None, [])]
    for start in range(0, len(tokens) - 1, reader.at_once):
        stop = min(start + reader.at_once, len(tokens) - 1)
        log_probabilities = reader.predict(heard[start:stop], tokens[stop - 1])[0].log_probabilities
        best = log_probabilities.topk(min(likely, log_probabilities.shape[1]))
        came = log_probabilities.gather(
            1, torch.tensor(tokens[start + 1 : stop + 1], device=best.values.device)[:, None]
        )
        yield [
            Token(tokens[place], texts[place], value, list(zip(ids, values)))
            for place, value, ids, values in zip(
                range(start + 1, stop + 1), came[:, 0].tolist(), best.indices.tolist(), best.values.tolist()
            )
        ]


def joined(parts: list[Piece]) -> Piece:
    """The pieces of one answer as one."""
    last = parts[-1]
    return Piece(
        last.answer,
        "".join(part.text for part in parts),
        [token for part in parts for token in part.tokens],
        sum(part.written for part in parts),
        last.finished,
        last.citations,
    )


class TextForm:
    """Answers of /v1/completions. One for each request: it keeps count of where tokens stand."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, tokeniser: Tokeniser, order: Order):
        self._tokeniser, self._scored = tokeniser, order.likely is not None
        about = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._whole, self._chunk = ({**about, "object": kind} for kind in (self.kind, self.chunk_kind))
        self._read, self._written = order.read, 0
        self._at: dict[int, int] = defaultdict(int)

    def whole(self, parts: list[Piece]) -> dict[str, Any]:
        answers: dict[int, list[Piece]] = defaultdict(list)
        for part in parts:
            answers[part.answer].append(part)
        self._written += sum(part.written for part in parts)
        return {**self._whole, "choices": [self._choice(joined(each)) for each in answers.values()], **self._usage()}

    def chunks(self, part: Piece) -> Iterator[dict[str, Any]]:
        self._written += part.written
        if part.text or part.tokens or part.finished:
            yield {**self._chunk, "choices": [self._streamed(part)]}

    def last_chunk(self) -> dict[str, Any]:
        return {**self._chunk, "choices": [], **self._usage()}

    def _usage(self) -> dict[str, Any]:
        total = self._read + self._written
        usage = {"prompt_tokens": self._read, "completion_tokens": self._written, "total_tokens": total}
        return {"usage": usage}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {**self._common(piece), "text": piece.text, "logprobs": self._logprobs(piece)}

    _streamed = _choice

    def _common(self, piece: Piece) -> dict[str, Any]:
        about = {"index": piece.answer, "finish_reason": piece.finished}
        return about if piece.citations is None else {**about, "citations": [_cited(each) for each in piece.citations]}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._scored:
            return None
        spell = self._tokeniser.spell
        found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in piece.tokens:
            own = token.log_probability
            found["tokens"].append(spell(token.id))
            found["token_logprobs"].append(None if own is None else max(own, _LEAST))
            likely = [] if own is None else [(token.id, own), *reversed(token.likely)]
            found["top_logprobs"].append({spell(id): max(value, _LEAST) for id, value in likely} or None)
            found["text_offset"].append(self._at[piece.answer])
            self._at[piece.answer] += len(token.text)
        return found


class ChatForm(TextForm):
    """Answers of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def chunks(self, part: Piece) -> Iterator[dict[str, Any]]:
        if part.answer not in self._at:
            self._at[part.answer] = 0
            delta = {"role": "assistant", "content": ""}
            yield {**self._chunk, "choices": [{**self._common(Piece(part.answer)), "delta": delta, "logprobs": None}]}
        yield from super().chunks(part)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {**self._common(piece), "message": message, "logprobs": self._logprobs(piece)}

    def _streamed(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {**self._common(piece), "delta": delta, "logprobs": self._logprobs(piece)}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._scored:
            return None
        said = [token for token in piece.tokens if token.id not in self._tokeniser.end_tokens]
        content = [
            {
                **self._named(token.id, token.log_probability),
                "top_logprobs": [self._named(*each) for each in token.likely],
            }
            for token in said
        ]
        return {"content": content, "refusal": None}

    def _named(self, id: int, log_probability: float | None) -> dict[str, Any]:
        text = self._tokeniser.decode([id])
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": self._tokeniser.spell(id), "logprob": max(log_probability or 0.0, _LEAST), "bytes": whole}


def _cited(span: Span) -> dict[str, Any]:
    sources = [{"document": each.document, "offset": each.offset, "weight": each.weight} for each in span.sources]
    return {"start": span.start, "end": span.end, "sources": sources}


def event(content: dict[str, Any] | str) -> bytes:
    """As a stream sends it."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, allow_nan=False)
    return f"data: {text}\n\n".encode()
