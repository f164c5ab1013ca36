"""The explorer as a web application: a static page and a few questions that are answered in JSON.

Whatever text comes in or goes out is data: the page puts it on screen as text, and no path is ever made of it.
"""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spalm.errors import InputError
from spalm.generation.explorer import LONGEST, Explorer, Passage, Picked, Switches
from spalm.runs import HeldOut
from spalm.server.errors import answer_errors, refusal
from spalm.server.queue import Desk

PAGE = Path(__file__).parent / "page"
BODY_BYTES = 1 << 20
_WAITING = 64
"""Questions to the explorer that may wait."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Asking(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Place(Asking):
    split: HeldOut
    document: int = Field(ge=0)
    offset: int = Field(default=0, ge=0)
    length: int = Field(default=400, gt=0, le=LONGEST)


class Question(Asking):
    """A passage, either `text` or `place`, and what of the memory is switched off."""

    text: str | None = None
    place: Place | None = None
    entries_off: Annotated[list[int], Field(max_length=100_000)] = []
    documents_off: Annotated[list[int], Field(max_length=100_000)] = []

    @property
    def passage(self) -> Passage:
        if (self.text is None) == (self.place is None):
            raise InputError("give either a text or a place in the corpus")
        return self.text if self.place is None else Picked(**self.place.model_dump())

    @property
    def off(self) -> Switches:
        return Switches(frozenset(self.entries_off), frozenset(self.documents_off))


class TokenQuestion(Question):
    position: int = Field(ge=0)


def explorer_routes(explorer: Explorer, desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api")

    @routes.get("/about")
    def about() -> dict:
        return explorer.about()

    @routes.get("/documents")
    def documents(split: HeldOut, containing: str = "") -> list[dict]:
        return explorer.documents(split, containing)

    @routes.post("/passage")
    async def passage(question: Question, request: Request) -> dict:
        return await desk.work(request.receive, lambda: explorer.passage(question.passage, question.off))

    @routes.post("/token")
    async def token(question: TokenQuestion, request: Request) -> dict:
        position = question.position
        return await desk.work(request.receive, lambda: explorer.token(question.passage, position, question.off))

    return routes


def make_app(explorer: Explorer, hosts: list[str]) -> FastAPI:
    """`hosts`: the names by which the server may be called; any other is a page elsewhere that tries to reach it."""
    app, desk = new_app(_WAITING)
    app.include_router(explorer_routes(explorer, desk))
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    app.add_middleware(Guard)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    return app


def new_app(waiting: int) -> tuple[FastAPI, Desk]:
    """An application without routes that answers errors, and the desk at which its requests are worked on."""
    app = FastAPI(title="spalm", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.desk = Desk(waiting)
    answer_errors(app)
    return app, app.state.desk


class Guard:
    """Puts the headers on every answer, and refuses bodies that are too large, whatever length they claim."""

    def __init__(self, app: ASGIApp, body_bytes: int = BODY_BYTES):
        self._app, self._body_bytes = app, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        body, more = bytearray(), scope["method"] in ("POST", "PUT", "PATCH")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._body_bytes:
                too_large = f"the request has more than {self._body_bytes:,} bytes"
                await refusal(scope["path"], 413, too_large)(scope, receive, send_guarded)
                return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, receive_whole, send_guarded)
