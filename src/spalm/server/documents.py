"""The documents of a memory, over HTTP: listing, adding and deleting them.

A name may be any text; no file path is ever made from one. A change is on disk when it is acknowledged.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.convertors import StringConvertor, register_url_convertor

from spalm.choices import LARGEST
from spalm.generation import Model
from spalm.server.errors import RequestRefused
from spalm.server.http import JsonRoute
from spalm.server.http.fields import ClosedForm
from spalm.server.limits import Limits
from spalm.server.queue import RequestQueue

_MOST = 10_000
"""Highest number of documents that are listed at a time."""


class _AnyText(StringConvertor):
    """Matches the rest of a path, slashes and line ends included."""

    regex = "(?s:.+)"


register_url_convertor("anything", _AnyText())


class DocumentRequest(ClosedForm):
    """A document to be added."""

    name: str = Field(min_length=1, max_length=1000)
    text: str


def document_routes(model: Model, queue: RequestQueue, limits: Limits) -> APIRouter:
    """Returns the routes below /memory/documents. Changes wait in the queue, so that no search runs meanwhile."""
    routes, memory = APIRouter(prefix="/memory/documents", route_class=JsonRoute), model.memory

    @routes.get("")
    def documents(
        containing: str = "",
        limit: Annotated[int, Query(ge=0, le=_MOST)] = _MOST,
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    ) -> dict[str, Any]:
        """Lists documents by a part of their names, oldest first."""
        wanted = containing.casefold()
        found = [document for document in memory.documents() if wanted in document.name.casefold()]
        shown = [{"name": document.name, "entries": document.entries} for document in found[offset : offset + limit]]
        return {"documents": shown, "total": len(found), "entries": len(memory)}

    @routes.post("", status_code=201)
    async def add(document: DocumentRequest, request: Request) -> dict[str, Any]:
        size = len(document.text.encode())
        if size > limits.document_bytes:
            raise RequestRefused(
                413,
                f"text: it has {size:,} bytes, a document may have {limits.document_bytes:,} (document_bytes); add it "
                "in parts, or with `spalm remember`",
                param="text",
            )

        def work() -> int:
            return memory.add(document.name, document.text, check=queue.check)

        return {"name": document.name, "entries": await queue.run(request.receive, work)}

    async def delete(name: str, request: Request) -> dict[str, Any]:
        count = await queue.run(request.receive, lambda: memory.forget(name))
        return {"name": name, "deleted": count}

    # The name may also be given as ?name=, because some clients normalise paths that contain "..".
    routes.delete("")(delete)
    routes.delete("/{name:anything}")(delete)
    return routes
