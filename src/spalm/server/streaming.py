"""Answers that are sent while they are generated, as server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spalm.server.errors import Refusal
from spalm.server.queue import ClientGone, RequestQueue, ServerStopping

_SEND_SECONDS = 30
"""Seconds within which a client must read what is sent; otherwise it would block the queue."""


class StreamedResponse(Response):
    """Waits for a turn in the queue, and sends what each step yields.

    The first step is made before anything is sent, so that a refusal has its own status. A later error is sent as an
    event, and the stream is closed properly.
    """

    media_type = "text/event-stream"

    def __init__(self, queue: RequestQueue, steps: Iterator[list[dict[str, Any]]]):
        super().__init__()
        del self.headers["content-length"]
        self._queue, self._steps = queue, steps
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            async with self._queue.turn(receive):
                async for chunks in self._queue.steps(self._steps):
                    await self._send(send, [_event(chunk) for chunk in chunks])
            await self._send(send, [_event("[DONE]")], more=False)
        except ClientGone:
            return
        except Exception as error:
            if not self._begun:
                raise
            stopped = isinstance(error, ServerStopping)
            message = "the server is being stopped" if stopped else "something went wrong in the server"
            refusal = Refusal(503 if stopped else 500, message)
            await self._send(send, [_event(refusal.in_openai_form())], more=False)
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


def _event(content: dict[str, Any] | str) -> bytes:
    """Returns a server-sent event."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, allow_nan=False)
    return f"data: {text}\n\n".encode()
