"""Answers in Ollama's form: one JSON object for each chunk, the last with the figures."""

import time
from datetime import UTC, datetime
from typing import Any

from spalm.generation import Chunk
from spalm.server.answers import GenerationJob
from spalm.server.openai.responses import joined, sources_in_json

_NANOSECONDS = 1_000_000_000


class OllamaResponse:
    """The answer of /api/generate. Each request has its own, as it counts tokens and measures times."""

    def __init__(self, model: str, job: GenerationJob):
        self._model, self._prompt_tokens = model, job.prompt_tokens
        self._passages_of = job.passages_of
        self._begun = time.perf_counter()
        self._read: float | None = None
        self._generated = 0

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Returns the object that is sent for a chunk of a streamed answer, if it has text."""
        self._count(chunk)
        return [self._object(chunk)] if chunk.text or chunk.finish_reason else []

    def last_events(self) -> list[dict[str, Any]]:
        """Returns nothing: the last chunk has the figures."""
        return []

    def whole(self, chunks: list[Chunk]) -> dict[str, Any]:
        """Returns the whole answer."""
        for chunk in chunks:
            self._count(chunk)
        return self._object(joined(chunks))

    def _count(self, chunk: Chunk) -> None:
        self._read = self._read or time.perf_counter()
        self._generated += chunk.generated

    def _object(self, chunk: Chunk) -> dict[str, Any]:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        done = chunk.finish_reason is not None
        found = {"model": self._model, "created_at": created, **self._text(chunk.text), "done": done}
        found |= sources_in_json(chunk, self._passages_of(chunk.choice))
        return {**found, **self._figures(chunk)} if done else found

    def _text(self, text: str) -> dict[str, Any]:
        return {"response": text}

    def _figures(self, chunk: Chunk) -> dict[str, Any]:
        """Returns why the answer ended, and its figures; durations are in nanoseconds."""
        end, read = time.perf_counter(), self._read or self._begun
        return {
            "done_reason": chunk.finish_reason,
            "total_duration": int((end - self._begun) * _NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": int((read - self._begun) * _NANOSECONDS),
            "eval_count": self._generated,
            "eval_duration": int((end - read) * _NANOSECONDS),
        }


class OllamaChatResponse(OllamaResponse):
    """The answer of /api/chat."""

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}
