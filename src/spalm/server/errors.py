"""Refusals: every error of the server as a status and a line, in the form that the client expects.

Below /v1 the form is OpenAI's, {"error": {"message", "type", "param", "code"}}; elsewhere {"error": "message"}.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount

from spalm.errors import InputError, InUseError
from spalm.generation import DocumentExists, UnknownDocument
from spalm.server.model_thread import ServerStopping
from spalm.server.queue import ClientGone, QueueFull, RequestTimedOut

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY = {"Retry-After": "1"}
_CLIENT_GONE = 499
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_REASONS = {
    400: "The request cannot be understood, or asks for what the model cannot do.",
    401: "The key is missing or wrong.",
    403: "The request comes from a page of another site, or its key has no right to the memory.",
    404: "There is no such model, memory or document.",
    405: "The path does not take this method.",
    409: "There is a document of this name already.",
    413: "The request is too large.",
    415: "The body is not JSON.",
    422: "The request cannot be understood, or asks for what the model cannot do.",
    429: "Too many requests are waiting.",
    503: "The memory is being written by another process, or the server is being stopped.",
    507: "The server could not write.",
}
"""Statuses of refusals, and what they mean."""
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": ["string", "object"]}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": reason, "content": {"application/json": {"schema": _ERROR}}}
    for status, reason in _REASONS.items()
}
"""The refusals that any request may get, for the description of the server in OpenAPI's form."""
_LONGEST_PART = 100
"""Number of characters of a field's name that are shown."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused."""

    status: int
    message: str
    param: str | None = None
    """Field of the request that is wrong, for OpenAI's clients."""
    code: str | None = None
    """Kind of the error, for OpenAI's clients."""

    def in_openai_form(self) -> dict[str, Any]:
        """Returns the body that OpenAI's clients read."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str, headers: dict[str, str] | None = None) -> JSONResponse:
        """Returns the answer to a request for `path`."""
        body = self.in_openai_form() if is_openai_path(path) else {"error": self.message}
        return JSONResponse(body, self.status, headers)


class RequestRefused(InputError):
    """A request that is refused with a status of its own."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.refusal = Refusal(status, message, param, code)


def is_openai_path(path: str) -> bool:
    """Returns whether a path is one that OpenAI's clients use."""
    return path.startswith("/v1/")


def _bad_input_status(path: str) -> int:
    return 400 if is_openai_path(path) else 422


def _methods_of_path(request: Request) -> list[str]:
    """Returns the methods that the path of a request takes; none for files of the page, which are at any other path."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    return [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]


def handle_errors(app: FastAPI) -> None:
    """Adds a handler for every kind of error, which sets the status and the form of the response.

    The handlers are coroutines, because the threads of other handlers would outlive a server that ends.
    """

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> Response:
        return error.refusal.response(request.url.path)

    @app.exception_handler(UnknownDocument)
    async def unknown_document(request: Request, error: UnknownDocument) -> Response:
        return Refusal(404, str(error)).response(request.url.path)

    @app.exception_handler(DocumentExists)
    async def document_exists(request: Request, error: DocumentExists) -> Response:
        return Refusal(409, str(error)).response(request.url.path)

    @app.exception_handler(InUseError)
    async def in_use(request: Request, error: InUseError) -> Response:
        return Refusal(503, str(error)).response(request.url.path, _RETRY)

    @app.exception_handler(InputError)
    async def bad_input(request: Request, error: InputError) -> Response:
        return Refusal(_bad_input_status(request.url.path), str(error)).response(request.url.path)

    @app.exception_handler(UnicodeEncodeError)
    async def no_unicode(request: Request, error: UnicodeEncodeError) -> Response:
        message = f"the text is no Unicode (sign {error.start}); give it as UTF-8"
        return Refusal(_bad_input_status(request.url.path), message).response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def bad_form(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return bad_field(request, first["loc"][1:], first["msg"])

    @app.exception_handler(ValidationError)
    async def bad_translation(request: Request, error: ValidationError) -> Response:
        """Refuses a request whose form in another API, such as OpenAI's for one of Ollama's, is wrong."""
        first = error.errors(include_url=False, include_input=False)[0]
        return bad_field(request, first["loc"], first["msg"])

    def bad_field(request: Request, location: tuple[int | str, ...], problem: str) -> Response:
        place = ".".join(str(part)[:_LONGEST_PART] for part in location)
        message = f"{place or 'the body'}: {problem}"
        return Refusal(_bad_input_status(request.url.path), message, place or None).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def bad_path(request: Request, error: HTTPException) -> Response:
        methods = _methods_of_path(request)
        if methods and error.status_code in (404, 405):
            allowed = {"Allow": ", ".join(methods)}
            return Refusal(405, "Method Not Allowed").response(request.url.path, allowed)
        return Refusal(error.status_code, str(error.detail)).response(request.url.path, dict(error.headers or {}))

    @app.exception_handler(QueueFull)
    async def queue_full(request: Request, _: QueueFull) -> Response:
        message = "too many requests are waiting; try again"
        return Refusal(429, message, code="rate_limit_exceeded").response(request.url.path, _RETRY)

    @app.exception_handler(RequestTimedOut)
    async def timed_out(request: Request, _: RequestTimedOut) -> Response:
        message = "the request took longer than it may (request_seconds); ask for less, or try again later"
        return Refusal(503, message, code="timeout").response(request.url.path, _RETRY)

    @app.exception_handler(ServerStopping)
    async def stopping(request: Request, _: ServerStopping) -> Response:
        return Refusal(503, "the server is being stopped; try again later").response(request.url.path, _RETRY)

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=_CLIENT_GONE)  # nobody reads it

    @app.exception_handler(OSError)
    async def cannot_write(request: Request, error: OSError) -> Response:
        message = f"{error.strerror or error}; the server could not write"
        return Refusal(507, message).response(request.url.path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _: Exception) -> Response:
        return Refusal(500, "something went wrong in the server; its log says what").response(request.url.path)
