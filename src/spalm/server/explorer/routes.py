"""The explorer over HTTP: a static page and a few requests that are answered in JSON.

Texts are never interpreted: the page shows them as plain text, and no file path is ever made from one.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from spalm.generation.inspection import Explorer
from spalm.runs import HeldOut
from spalm.server.explorer.protocol import PassageRequest, TokenRequest
from spalm.server.http import JsonRoute
from spalm.server.queue import RequestQueue

PAGE = Path(__file__).parent / "page"
"""Folder of the static page."""


def explorer_routes(explorer: Explorer, queue: RequestQueue) -> APIRouter:
    """Returns the routes below /api, which the page requests."""
    routes = APIRouter(prefix="/api", route_class=JsonRoute)

    @routes.get("/about")
    def about() -> dict[str, Any]:
        return explorer.about()

    @routes.get("/documents")
    def documents(split: HeldOut, containing: str = "") -> list[dict[str, Any]]:
        return explorer.documents(split, containing)

    @routes.post("/passage")
    async def passage(body: PassageRequest, request: Request) -> dict[str, Any]:
        return await queue.run(request.receive, lambda: explorer.passage(body.passage, body.off))

    @routes.post("/trace")
    async def trace(body: PassageRequest, request: Request) -> dict[str, Any]:
        return await queue.run(request.receive, lambda: explorer.trace(body.passage, body.off))

    @routes.post("/token")
    async def token(body: TokenRequest, request: Request) -> dict[str, Any]:
        return await queue.run(request.receive, lambda: explorer.token(body.passage, body.position, body.off))

    return routes
