"""Rules that every request must keep to before its route sees it, and security headers for every response."""

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spalm.server.errors import Refusal
from spalm.server.http.hosts import is_cross_site
from spalm.server.limits import Limits

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change and generate nothing."""
_WITH_BODY = ("POST", "PUT", "PATCH")


class _Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.refusal = Refusal(status, message)


class GuardMiddleware:
    """Refuses requests of pages of other sites, and bodies that are too large or too slow.

    Whatever length a body claims, it is read up to the limit only, and all bodies together have a limit too.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app, self._limits = app, limits
        self._held = 0
        """Number of bytes of all bodies at present."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        body = bytearray()
        try:
            self._check_headers(scope["method"], Headers(scope=scope))
            if scope["method"] not in _WITH_BODY:
                await self._app(scope, receive, send_guarded)
            elif await self._read(body, receive):
                await self._app(scope, _already_read(bytes(body), receive), send_guarded)
        except _Refused as refused:
            await refused.refusal.response(scope["path"])(scope, receive, send_guarded)
        finally:
            self._held -= len(body)

    def _check_headers(self, method: str, headers: Headers) -> None:
        if method in _READING:
            return
        if is_cross_site(headers):
            raise _Refused(403, "a page of another site sent this request; only pages of this server may")
        if method not in _WITH_BODY:
            return
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limits.body_bytes):
            raise self._too_large()

    async def _read(self, body: bytearray, receive: Receive) -> bool:
        """Reads the whole body; returns whether the client stayed."""
        more = True
        with anyio.move_on_after(self._limits.body_seconds) as patience:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                part = message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) + len(part) > self._limits.body_bytes:
                    raise self._too_large()
                if self._held + len(part) > self._limits.all_body_bytes:
                    raise _Refused(429, "the server is holding too many large requests; try again")
                body += part
                self._held += len(part)
        if patience.cancelled_caught:
            raise _Refused(408, f"the request did not arrive within {self._limits.body_seconds:g} seconds")
        return True

    def _too_large(self) -> _Refused:
        return _Refused(413, f"the request has more than {self._limits.body_bytes:,} bytes")


def _already_read(body: bytes, receive: Receive) -> Receive:
    """Returns what gives the whole body first, and then what `receive` gives."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_whole() -> Message:
        return whole.pop() if whole else await receive()

    return receive_whole
