"""Answers that are sent while they are generated: as server-sent events, or as lines of JSON."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spalm.server.errors import Refusal
from spalm.server.model_thread import ServerStopping
from spalm.server.queue import ClientGone, RequestQueue, Turn

StreamForm = Literal["events", "ndjson"]
"""Form of a stream: server-sent events, as OpenAI's clients expect, or a line of JSON each, as Ollama's do."""
_MEDIA_TYPES: dict[StreamForm, str] = {"events": "text/event-stream", "ndjson": "application/x-ndjson"}
STREAMED: dict[StreamForm, dict[int | str, dict[str, Any]]] = {
    form: {200: {"content": {media_type: {}}}} for form, media_type in _MEDIA_TYPES.items()
}
"""What the description of a path in OpenAPI's form says of its streams."""
_SEND_SECONDS = 30
"""Seconds within which a client must read what is sent."""


class StreamedResponse(Response):
    """Waits for a turn in the queue, and sends what each step yields.

    The first step is made before anything is sent, so that a refusal has its own status. A later error is sent as an
    event, and the stream is closed properly.
    """

    def __init__(
        self, queue: RequestQueue, events: Callable[[Turn], AsyncIterator[list[dict[str, Any]]]], form: StreamForm
    ):
        super().__init__(media_type=_MEDIA_TYPES[form])
        del self.headers["content-length"]
        self._queue, self._events, self._is_events = queue, events, form == "events"
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            async with self._queue.turn(receive) as turn:
                async for events in self._events(turn):
                    await self._send(send, [self._encoded(event) for event in events])
            await self._send(send, [b"data: [DONE]\n\n"] if self._is_events else [], more=False)
        except ClientGone:
            return
        except Exception as error:
            if not self._begun:
                raise
            stopped = isinstance(error, ServerStopping)
            message = "the server is being stopped" if stopped else "something went wrong in the server"
            refusal = Refusal(503 if stopped else 500, message)
            error_form = refusal.in_openai_form() if self._is_events else {"error": message}
            await self._send(send, [self._encoded(error_form)], more=False)
            if not stopped:
                raise

    async def _send(self, send: Send, events: list[bytes], *, more: bool = True) -> None:
        """Sends events, after the headers if they are the first; raises ClientGone if the client does not read."""
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with anyio.move_on_after(_SEND_SECONDS) as patience:
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})
        if patience.cancelled_caught:
            raise ClientGone

    def _encoded(self, content: dict[str, Any]) -> bytes:
        """Returns an object as it is sent."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        return (f"data: {text}\n\n" if self._is_events else f"{text}\n").encode()
