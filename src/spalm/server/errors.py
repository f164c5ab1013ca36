"""What a server says when it does not do what it was asked: a status and a line, in the form that the asker reads.

Below /v1 that is OpenAI's, {"error": {"message", "type", "param", "code"}}; elsewhere {"error": "message"}.
"""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from spalm.errors import InputError, InUseError
from spalm.server.queue import Busy, Gone, Stopping

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_SOON = {"Retry-After": "1"}
_CLIENT_GONE = 499


class Refused(InputError):
    """With a status of its own, and what OpenAI's clients are told beside the message."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def like_openai(path: str) -> bool:
    return path.startswith("/v1/")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """In OpenAI's form."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    path: str,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    body = error_body(message, status, param, code) if like_openai(path) else {"error": message}
    return JSONResponse(body, status, headers)


def answer_errors(app: FastAPI) -> None:
    """Gives every error of an application its status and its form; not in threads, which a server that ends leaves."""

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> Response:
        return refusal(request.url.path, error.status, str(error), error.param, error.code)

    @app.exception_handler(InUseError)
    async def wait(request: Request, error: InUseError) -> Response:
        return refusal(request.url.path, 503, str(error), headers=_SOON)

    @app.exception_handler(InputError)
    async def refuse_input(request: Request, error: InputError) -> Response:
        return refusal(request.url.path, 400 if like_openai(request.url.path) else 422, str(error))

    @app.exception_handler(UnicodeEncodeError)
    async def refuse_half_letters(request: Request, error: UnicodeEncodeError) -> Response:
        status = 400 if like_openai(request.url.path) else 422
        return refusal(request.url.path, status, f"the text is no Unicode (sign {error.start}); give it as UTF-8")

    @app.exception_handler(RequestValidationError)
    async def refuse_form(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        status = 400 if like_openai(request.url.path) else 422
        return refusal(request.url.path, status, f"{place or 'the body'}: {first['msg']}", place or None)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        return refusal(request.url.path, error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(Busy)
    async def turn_away(request: Request, _: Busy) -> Response:
        message = "too many requests are waiting; try again"
        return refusal(request.url.path, 429, message, code="rate_limit_exceeded", headers=_SOON)

    @app.exception_handler(Stopping)
    async def stop(request: Request, _: Stopping) -> Response:
        return refusal(request.url.path, 503, "the server is being stopped; try again later", headers=_SOON)

    @app.exception_handler(Gone)
    async def nobody_reads_this(_: Request, __: Gone) -> Response:
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(OSError)
    async def no_space(request: Request, error: OSError) -> Response:
        return refusal(request.url.path, 507, f"{error.strerror or error}; the server could not write")

    @app.exception_handler(Exception)
    async def apologise(request: Request, _: Exception) -> Response:
        return refusal(request.url.path, 500, "something went wrong in the server; its log says what")
