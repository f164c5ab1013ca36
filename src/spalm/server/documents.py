"""Memories and their documents, over HTTP: listing them, adding and deleting documents.

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
from spalm.server.http.fields import ClosedForm, Name
from spalm.server.limits import Limits
from spalm.server.queue import RequestQueue
from spalm.server.rights import GivenRights, changeable_documents, readable_documents, selected_memories

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
    memory: Name | None = None
    """Name of the memory; by default that of the served directory."""


MemoryName = Annotated[str | None, Query(max_length=1000)]
"""Name of a memory in a query; by default that of the served directory."""


def memory_routes(model: Model) -> APIRouter:
    """Returns the route that lists the memories which the holder of a key may use."""
    routes = APIRouter(prefix="/memory", route_class=JsonRoute)

    @routes.get("")
    def memories(rights: GivenRights) -> dict[str, Any]:
        found = []
        for name in selected_memories(model, None, rights).names:
            entries = model.memories[name].store.entries()
            counts = {"documents": len(entries.live_documents), "entries": len(entries)}
            found.append({"name": name, **counts, "may_change": rights.may_change(name)})
        return {"memories": found}

    return routes


def document_routes(model: Model, queue: RequestQueue, limits: Limits) -> APIRouter:
    """Returns the routes below /memory/documents. Changes wait in the queue, so that no search runs meanwhile."""
    routes = APIRouter(prefix="/memory/documents", route_class=JsonRoute)

    @routes.get("")
    def documents(
        *,
        rights: GivenRights,
        memory: MemoryName = None,
        containing: str = "",
        limit: Annotated[int, Query(ge=0, le=_MOST)] = _MOST,
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    ) -> dict[str, Any]:
        """Lists documents by a part of their names, oldest first."""
        wanted, held = containing.casefold(), readable_documents(model, memory, rights)
        found = [document for document in held.documents() if wanted in document.name.casefold()]
        shown = [{"name": document.name, "entries": document.entries} for document in found[offset : offset + limit]]
        return {"documents": shown, "total": len(found), "entries": len(held)}

    @routes.post("", status_code=201)
    async def add(document: DocumentRequest, request: Request, rights: GivenRights) -> dict[str, Any]:
        held = changeable_documents(model, document.memory, rights)
        size = len(document.text.encode())
        if size > limits.document_bytes:
            raise RequestRefused(
                413,
                f"text: it has {size:,} bytes, a document may have {limits.document_bytes:,} (document_bytes); add it "
                "in parts, or with `spalm remember`",
                param="text",
            )

        def work() -> int:
            return held.add(document.name, document.text, check=queue.check)

        return {"name": document.name, "entries": await queue.run(request.receive, work)}

    async def delete(name: str, request: Request, rights: GivenRights, *, memory: MemoryName = None) -> dict[str, Any]:
        held = changeable_documents(model, memory, rights)
        count = await queue.run(request.receive, lambda: held.forget(name))
        return {"name": name, "deleted": count}

    # The name may also be given as ?name=, because some clients normalise paths that contain "..".
    routes.delete("")(delete)
    routes.delete("/{name:anything}")(delete)
    return routes
