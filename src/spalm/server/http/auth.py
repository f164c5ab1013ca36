"""Authentication: the key that every client of the server must send."""

import base64
import binascii
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spalm.server.errors import Refusal, is_openai_path

_OPEN = "/health"
"""Path that is answered without the key, so that monitoring need not know it."""


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY`. Browsers cannot send it; they ask the user for a password, the same key."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == _OPEN or self._knows_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        scheme = "Bearer" if is_openai_path(scope["path"]) else 'Basic realm="spalm", charset="UTF-8"'
        refusal = Refusal(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await refusal.response(scope["path"], {"WWW-Authenticate": scheme})(scope, receive, send)

    def _knows_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")  # the header's bytes: starlette decodes them as Latin-1
        if scheme.lower() == "basic":
            try:
                sent = base64.b64decode(sent, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return secrets.compare_digest(sent, self._key)
