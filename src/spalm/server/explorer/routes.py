"""The explorer over HTTP: a static page and a few questions that are answered in JSON.

Whatever text comes in or goes out is data: the page puts it on screen as text, and no path is ever made of it.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from spalm.generation.inspection import Explorer
from spalm.runs import HeldOut
from spalm.server.explorer.protocol import PassageRequest, TokenRequest
from spalm.server.queue import RequestQueue

PAGE = Path(__file__).parent / "page"
"""Folder of the static page."""


def explorer_routes(explorer: Explorer, queue: RequestQueue) -> APIRouter:
    """Returns the routes below /api that the page asks."""
    routes = APIRouter(prefix="/api")

    @routes.get("/about")
    def about() -> dict[str, Any]:
        return explorer.about()

    @routes.get("/documents")
    def documents(split: HeldOut, containing: str = "") -> list[dict[str, Any]]:
        return explorer.documents(split, containing)

    @routes.post("/passage")
    async def passage(question: PassageRequest, request: Request) -> dict[str, Any]:
        return await queue.run(request.receive, lambda: explorer.passage(question.passage, question.off))

    @routes.post("/token")
    async def token(question: TokenRequest, request: Request) -> dict[str, Any]:
        position = question.position
        return await queue.run(request.receive, lambda: explorer.token(question.passage, position, question.off))

    return routes
