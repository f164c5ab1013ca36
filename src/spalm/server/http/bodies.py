"""Bodies of requests: JSON, checked by their models within bounds of time and memory."""

import email.message
import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from spalm.server.errors import RequestRefused

MOST_VALUES = 1 << 18
"""Highest number of values, such as items of lists, in a body."""
_LARGE = 1 << 16
"""Number of bytes from which a body is checked in a thread beside the event loop."""
_CHECKED_AT_ONCE = 2
"""Number of large bodies that are checked at the same time."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_checking = anyio.CapacityLimiter(_CHECKED_AT_ONCE)


class JsonRoute(APIRoute):
    """A route that checks its body itself.

    FastAPI would do it on the event loop, where all other clients wait meanwhile.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the function that handles a request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def check_and_handle(request: Request) -> Response:
            if not _is_json(request.headers.get("content-type", "")):  # pages of other sites can send only other types
                raise RequestRefused(415, "send JSON, with the header Content-Type: application/json")
            body = await request.body()
            check = partial(checked, model, body)
            content = await to_thread.run_sync(check, limiter=_checking) if len(body) > _LARGE else check()
            return await handle(_CheckedRequest(request, body, content))

        return check_and_handle


class _CheckedRequest(Request):
    """A request whose body has been read and checked. FastAPI takes an instance of the body's model as it is."""

    def __init__(self, request: Request, body: bytes, content: BaseModel):
        super().__init__(request.scope, request.receive)
        self._given, self._content = body, content

    async def body(self) -> bytes:
        return self._given

    async def json(self) -> Any:
        return self._content


def checked(model: type[BaseModel], body: bytes) -> BaseModel:
    """Returns the content of a body; raises RequestValidationError with the first thing that is wrong in it."""
    if _count_values(body) > MOST_VALUES:
        raise _refused((), f"there are more than {MOST_VALUES:,} values in it")
    try:
        return model.model_validate_json(body, strict=True)  # as described: no 0 for false, no "1" for 1
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refused(first["loc"], first["msg"]) from None


def _refused(place: tuple[int | str, ...], message: str) -> RequestValidationError:
    return RequestValidationError([{"loc": ("body", *place), "msg": message}])


def _count_values(body: bytes) -> int:
    """Returns at least as many as the values in a body of JSON.

    They are counted before the body is parsed, because a value takes up to a hundred times the memory of its two bytes.
    """
    count, strings = _count_signs(body), (body.count(b'"') - body.count(b'\\"')) // 2
    if count <= MOST_VALUES or strings > MOST_VALUES:
        return max(count, strings)
    return _count_signs(_STRING.sub(b"", body))  # a long text may have many commas


def _count_signs(body: bytes) -> int:
    """Returns the number of signs that precede values."""
    return 1 + sum(map(body.count, (b",", b"[", b"{")))


def _is_json(content_type: str) -> bool:
    """Returns whether a content type is application/json, or one built on it such as application/ld+json."""
    message = email.message.Message()
    message["content-type"] = content_type
    kind = message.get_content_type()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
