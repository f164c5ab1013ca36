"""Authentication: the keys of clients, and the rights that each of them has."""

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spalm.errors import InputError
from spalm.files import read_text
from spalm.server.errors import Refusal, is_openai_path
from spalm.server.rights import ALL_RIGHTS, RIGHTS_SCOPE, Rights

_OPEN = "/health"
"""Path that is answered without a key, so that monitoring need not know one."""


class _Key(BaseModel):
    """A key of a file of keys."""

    model_config = ConfigDict(extra="forbid")
    key: str = Field(min_length=1)
    reads: list[str] = []
    changes: list[str] = []


class Keys:
    """The keys by which clients are known, and the rights of each."""

    def __init__(self) -> None:
        self._rights: dict[bytes, Rights] = {}

    def add(self, key: str, rights: Rights = ALL_RIGHTS) -> None:
        """Adds a key with its rights."""
        if not key:
            raise InputError("a key is empty; give one that nobody guesses, or none")
        if _digest(key.encode()) in self._rights:
            raise InputError("two keys are the same, so their rights are not clear; give each once")
        self._rights[_digest(key.encode())] = rights

    def rights_of(self, sent: bytes) -> Rights | None:
        """Returns the rights of a key; None if there is no such key. The time does not tell how much of it is right."""
        given, found = _digest(sent), None
        for digest, rights in self._rights.items():
            if secrets.compare_digest(digest, given):
                found = rights
        return found

    def refuse_unknown_memories(self, names: Iterable[str], file: Path) -> None:
        """Refuses rights to memories that are not there: a name that is misspelt would give none."""
        known = list(names)
        named = {name for rights in self._rights.values() for name in rights.reads or ()}
        if unknown := sorted(named.difference(known)):
            there = ", ".join(map(repr, known))
            raise InputError(f"{file}: there is no memory {unknown[0][:100]!r}; this server has {there}")


def read_keys(file: Path) -> Keys:
    """Returns the keys in a file: a JSON list of objects with a `key`, and the names of memories it `reads`, `changes`.

    What a key may change it may also use.
    """
    form = 'a list such as [{"key": "...", "reads": ["A"], "changes": []}]'
    try:
        given = json.loads(read_text(file, remedy="write it anew"))
    except (json.JSONDecodeError, RecursionError):
        raise InputError(f"{file} is no JSON; write {form}") from None
    if not isinstance(given, list) or not given:
        raise InputError(f"{file} holds no keys; write {form}")
    keys = Keys()
    for number, each in enumerate(given):
        try:
            key = _Key.model_validate(each)
        except ValidationError as error:  # never shows the value, which may be a key
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))[:100]
            raise InputError(f"{file}: number {number + 1}: {place}: {first['msg']}; write {form}") from None
        keys.add(key.key, Rights(frozenset([*key.reads, *key.changes]), frozenset(key.changes)))
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY`, and notes the rights of the key in the request's scope.

    Browsers cannot send it; they ask the user for a password, the same key.
    """

    def __init__(self, app: ASGIApp, keys: Keys):
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == _OPEN:
            await self._app(scope, receive, send)
            return
        rights = self._rights(Headers(scope=scope))
        if rights is not None:
            scope[RIGHTS_SCOPE] = rights
            await self._app(scope, receive, send)
            return
        scheme = "Bearer" if is_openai_path(scope["path"]) else 'Basic realm="spalm", charset="UTF-8"'
        refusal = Refusal(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await refusal.response(scope["path"], {"WWW-Authenticate": scheme})(scope, receive, send)

    def _rights(self, headers: Headers) -> Rights | None:
        """Returns the rights of the key in a request's headers; None if there is none, or no such key."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")  # the header's bytes: starlette decodes them as Latin-1
        if scheme.lower() == "basic":
            try:
                sent = base64.b64decode(sent, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif scheme.lower() != "bearer":
            return None
        return self._keys.rights_of(sent)
