"""Answers in OpenAI's form, either streamed chunk by chunk or joined at the end."""

import time
import uuid
from collections import defaultdict
from typing import Any

from spalm.corpus import Tokeniser
from spalm.generation import Chunk, Citation, CitedSource, RankedPassage
from spalm.server.answers import GenerationJob

_LEAST = -9999.0
"""Lowest log-probability in an answer; it stands for log 0, for which JSON has no value."""


def joined(chunks: list[Chunk]) -> Chunk:
    """Returns the chunks of one answer as one."""
    last = chunks[-1]
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        tokens=[token for chunk in chunks for token in chunk.tokens],
        finish_reason=last.finish_reason,
        citations=last.citations,
        generated=sum(chunk.generated for chunk in chunks),
        choice=last.choice,
    )


class CompletionResponse:
    """The answer of /v1/completions. Each request has its own, as it counts tokens and characters."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, tokeniser: Tokeniser, job: GenerationJob, *, include_usage: bool = False):
        """`include_usage`: a stream ends with the numbers of tokens."""
        self._tokeniser, self._scored, self._include_usage = tokeniser, job.likely is not None, include_usage
        self._passages_of = job.passages_of
        head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._whole, self._chunk = ({**head, "object": kind} for kind in (self.kind, self.chunk_kind))
        self._prompt_tokens, self._generated = job.prompt_tokens, 0
        self._offsets: dict[int, int] = defaultdict(int)
        """Number of characters of each answer so far."""

    def whole(self, chunks: list[Chunk]) -> dict[str, Any]:
        """Returns the whole answer."""
        answers: dict[int, list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            answers[chunk.choice].append(chunk)
        self._generated += sum(chunk.generated for chunk in chunks)
        choices = [self._choice(joined(each)) for _, each in sorted(answers.items())]
        return {**self._whole, "choices": choices, **self._usage()}

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Returns the events that are sent for a chunk of a streamed answer."""
        self._generated += chunk.generated
        if chunk.text or chunk.tokens or chunk.finish_reason:
            return [{**self._chunk, "choices": [self._streamed(chunk)]}]
        return []

    def last_events(self) -> list[dict[str, Any]]:
        """Returns the event that ends a stream, which holds the usage, if it is wanted."""
        return [{**self._chunk, "choices": [], **self._usage()}] if self._include_usage else []

    def _usage(self) -> dict[str, Any]:
        total = self._prompt_tokens + self._generated
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._generated, "total_tokens": total}
        return {"usage": usage}

    def _choice(self, chunk: Chunk) -> dict[str, Any]:
        return {**self._common(chunk), "text": chunk.text, "logprobs": self._logprobs(chunk)}

    def _streamed(self, chunk: Chunk) -> dict[str, Any]:
        return self._choice(chunk)

    def _common(self, chunk: Chunk) -> dict[str, Any]:
        """Returns the fields that choices of both endpoints have."""
        fields: dict[str, Any] = {"index": chunk.choice, "finish_reason": chunk.finish_reason}
        return {**fields, **sources_in_json(chunk, self._passages_of(chunk.choice))}

    def _logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        if not self._scored:
            return None
        spell = self._tokeniser.spell
        found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in chunk.tokens:
            own = token.log_probability
            found["tokens"].append(spell(token.id))
            found["token_logprobs"].append(None if own is None else max(own, _LEAST))
            likely = [] if own is None else [(token.id, own), *reversed(token.likely)]
            found["top_logprobs"].append({spell(id): max(value, _LEAST) for id, value in likely} or None)
            found["text_offset"].append(self._offsets[chunk.choice])
            self._offsets[chunk.choice] += len(token.text)
        return found


class ChatResponse(CompletionResponse):
    """The answer of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Returns the events for a chunk; an answer begins with one that names the role."""
        if chunk.choice in self._offsets:
            return super().events(chunk)
        self._offsets[chunk.choice] = 0
        first, delta = Chunk(choice=chunk.choice), {"role": "assistant", "content": ""}
        begin = {**self._chunk, "choices": [{**self._common(first), "delta": delta, "logprobs": None}]}
        return [begin, *super().events(chunk)]

    def _choice(self, chunk: Chunk) -> dict[str, Any]:
        message = {"role": "assistant", "content": chunk.text, "refusal": None}
        return {**self._common(chunk), "message": message, "logprobs": self._logprobs(chunk)}

    def _streamed(self, chunk: Chunk) -> dict[str, Any]:
        delta = {"content": chunk.text} if chunk.text else {}
        return {**self._common(chunk), "delta": delta, "logprobs": self._logprobs(chunk)}

    def _logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        if not self._scored:
            return None
        content = [
            {
                **self._named(token.id, token.log_probability),
                "top_logprobs": [self._named(*each) for each in token.likely],
            }
            for token in chunk.tokens
            if token.id not in self._tokeniser.end_tokens
        ]
        return {"content": content, "refusal": None}

    def _named(self, id: int, log_probability: float | None) -> dict[str, Any]:
        """Returns a token's text, log-probability and, if its characters are complete, bytes."""
        text = self._tokeniser.decode([id])
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": self._tokeniser.spell(id), "logprob": max(log_probability or 0.0, _LEAST), "bytes": whole}


def sources_in_json(chunk: Chunk, passages: list[RankedPassage] | None) -> dict[str, Any]:
    """Returns the fields that say where an answer comes from, if they are wanted; they come with its last chunk."""
    fields: dict[str, Any] = {}
    if chunk.citations is not None:
        fields["citations"] = [_citation_in_json(each) for each in chunk.citations]
    if chunk.finish_reason is not None and passages is not None:
        fields["passages"] = [{**_place_in_json(each), "tokens": each.tokens, "score": each.score} for each in passages]
    return fields


def _citation_in_json(citation: Citation) -> dict[str, Any]:
    """Returns a citation as clients get it."""
    sources = [{**_place_in_json(each), "weight": each.weight} for each in citation.sources]
    return {"start": citation.start, "end": citation.end, "sources": sources}


def _place_in_json(place: CitedSource | RankedPassage) -> dict[str, Any]:
    return {"memory": place.memory, "document": place.document, "offset": place.offset}
