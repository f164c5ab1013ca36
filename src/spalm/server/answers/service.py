"""Answers to requests for text: whole, or streamed while they are generated."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response

from spalm.corpus import Tokeniser
from spalm.generation import Chunk
from spalm.server.answers.jobs import GenerationJob
from spalm.server.answers.streaming import StreamedResponse, StreamForm
from spalm.server.metrics import Metrics
from spalm.server.queue import RequestQueue, Turn


class AnswerForm(Protocol):
    """The form in which a protocol gives the answers of one request."""

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Returns what is sent for a chunk of a streamed answer."""
        ...

    def last_events(self) -> list[dict[str, Any]]:
        """Returns what is sent at the end of a stream."""
        ...

    def whole(self, chunks: list[Chunk]) -> dict[str, Any]:
        """Returns the whole answer at once."""
        ...


class AnswerService:
    """Answers requests for text. What is wrong with a request is found while it has a place in the queue."""

    def __init__(self, queue: RequestQueue, metrics: Metrics, tokeniser: Tokeniser):
        self._queue, self._metrics, self._tokeniser = queue, metrics, tokeniser

    async def respond(
        self,
        request: Request,
        parse: Callable[[], GenerationJob],
        form_of: Callable[[GenerationJob], AnswerForm],
        *,
        stream: StreamForm | None,
        searches: bool = False,
    ) -> Response:
        """Returns the answer to a request, which `parse` turns into a job; `stream`: in pieces of this form.

        `searches` says that `parse` ranks passages of the memory, which may take long.
        """

        async def chunks(turn: Turn, job: GenerationJob) -> AsyncIterator[Chunk]:
            self._metrics.prompt_tokens += job.prompt_tokens
            async for chunk in turn.answers(job.requests(self._tokeniser)):
                self._metrics.generated_tokens += chunk.generated
                yield chunk

        async def events(turn: Turn) -> AsyncIterator[list[dict[str, Any]]]:
            job = await turn.prepare(parse, searches=searches)
            form = form_of(job)
            async for chunk in chunks(turn, job):
                yield form.events(chunk)
            yield form.last_events()

        if stream is not None:
            return StreamedResponse(self._queue, events, stream)
        async with self._queue.turn(request.receive) as turn:
            job = await turn.prepare(parse, searches=searches)
            form = form_of(job)
            return JSONResponse(form.whole([chunk async for chunk in chunks(turn, job)]))
