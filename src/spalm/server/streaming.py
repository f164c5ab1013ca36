"""Answers that are sent while they are made, as server-sent events."""

from collections.abc import Iterator
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spalm.server.errors import error_body
from spalm.server.openai.completions import event
from spalm.server.queue import Desk, Gone, Stopping

_PATIENCE = 30
"""Seconds in which a client must take what is sent: one that does not read would keep the desk."""


class Streamed(Response):
    """Takes its turn at the desk, and sends what each step there makes.

    The first step is made before anything is sent, so that what is refused has a status. What goes wrong later is told
    as an event, and the stream ends as it should.
    """

    media_type = "text/event-stream"

    def __init__(self, desk: Desk, steps: Iterator[list[dict[str, Any]]]):
        super().__init__()
        del self.headers["content-length"]
        self._desk, self._steps = desk, steps
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            async with self._desk.turn(receive):
                async for chunks in self._desk.steps(self._steps):
                    await self._send(send, [event(chunk) for chunk in chunks])
            await self._send(send, [event("[DONE]")], more=False)
        except Gone:
            return
        except Exception as error:
            if not self._begun:
                raise
            stopped = isinstance(error, Stopping)
            message = "the server is being stopped" if stopped else "something went wrong in the server"
            await self._send(send, [event(error_body(message, 503 if stopped else 500))], more=False)
            if not stopped:
                raise

    async def _send(self, send: Send, events: list[bytes], more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with anyio.move_on_after(_PATIENCE) as patience:
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})
        if patience.cancelled_caught:
            raise Gone
