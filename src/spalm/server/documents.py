"""The documents of a memory, over HTTP: listed, added, deleted.

Names are data: any text, and no path is ever made of one. What was acknowledged is on disk.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.convertors import StringConvertor, register_url_convertor

from spalm.generation import Model
from spalm.server.queue import RequestQueue

_MOST = 10_000
"""Documents that are listed at a time."""


class _AnyText(StringConvertor):
    """The rest of a path, with slashes and line ends."""

    regex = "(?s:.+)"


register_url_convertor("anything", _AnyText())


class DocumentRequest(BaseModel):
    """A document to be added."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=1000)
    text: str


def document_routes(model: Model, queue: RequestQueue) -> APIRouter:
    """Returns the routes below /memory/documents. Changes wait for their turn, so that no search runs meanwhile."""
    routes, memory = APIRouter(prefix="/memory/documents"), model.memory

    @routes.get("")
    def documents(
        containing: str = "",
        limit: Annotated[int, Query(ge=0, le=_MOST)] = _MOST,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, Any]:
        """Lists documents by a part of their names, oldest first."""
        wanted = containing.casefold()
        found = [document for document in memory.documents() if wanted in document.name.casefold()]
        shown = [{"name": document.name, "entries": document.entries} for document in found[offset : offset + limit]]
        return {"documents": shown, "total": len(found), "entries": len(memory)}

    @routes.post("", status_code=201)
    async def add(document: DocumentRequest, request: Request) -> dict[str, Any]:
        def work() -> int:
            return memory.add(document.name, document.text, check=queue.check)

        return {"name": document.name, "entries": await queue.run(request.receive, work)}

    async def delete(name: str, request: Request) -> dict[str, Any]:
        count = await queue.run(request.receive, lambda: memory.forget(name))
        return {"name": name, "deleted": count}

    # As ?name= too: some clients tidy up a path in which there is a name such as "..".
    routes.delete("")(delete)
    routes.delete("/{name:anything}")(delete)
    return routes
