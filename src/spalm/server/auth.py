"""A key that whoever uses the server must know."""

import base64
import binascii
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spalm.server.errors import like_openai, refusal

_OPEN = "/health"
"""Answers without the key: whoever looks after the server need not know it."""


class KeyCheck:
    """Lets in who sends `Authorization: Bearer KEY`. Browsers cannot: they ask for a password, which is the key too."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == _OPEN or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        ask = {"WWW-Authenticate": "Bearer" if like_openai(path) else 'Basic realm="spalm", charset="UTF-8"'}
        answer = refusal(path, 401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key", headers=ask)
        await answer(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")  # headers are bytes, whatever they are read as
        if scheme.lower() == "basic":
            try:
                sent = base64.b64decode(sent, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return secrets.compare_digest(sent, self._key)
