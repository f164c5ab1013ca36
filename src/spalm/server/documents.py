"""The documents of a memory, over HTTP: listed, added, deleted.

Names are data: any text, and no path is ever made of one. What was acknowledged is on disk.
"""

from itertools import islice
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.convertors import StringConvertor, register_url_convertor

from spalm.compute import Execution
from spalm.corpus import TokenStream
from spalm.generation.model import Live
from spalm.memory import remember, source_of_text
from spalm.server.errors import Refused
from spalm.server.queue import Desk

_BESIDE = 1 << 13
"""Entries that the index may lag behind: so many are searched one by one in no time, and it takes in many at once."""
_MOST = 10_000


class _Anything(StringConvertor):
    """The rest of a path, with slashes and line ends."""

    regex = "(?s:.+)"


register_url_convertor("anything", _Anything())


class NewDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=1000)
    text: str


class Shelf:
    """Changes a memory, and has its index follow. Whoever uses it holds the desk, so that no search goes on."""

    def __init__(self, live: Live, desk: Desk):
        self._live, self._go_on = live, desk.go_on
        self._follows = live.search.searcher.catch_up()
        self._behind = 0

    def add(self, name: str, text: str) -> int:
        """Returns the number of its entries."""
        live = self._live
        content, _ = text.encode(), name.encode()  # or it is refused before anything is written
        if name in live.memory.entries().live_documents.names:
            raise Refused(409, f"the memory holds a document {name!r} already; delete that first, or give another name")
        tokens = live.tokeniser.encode([content])[0]
        if not len(tokens):
            raise Refused(422, "text: there is nothing in it to remember")
        stream = TokenStream(tokens, np.array([len(tokens)]), lambda: [name], live.tokeniser.start)
        # A batch that a crash left half written was never acknowledged: it must not stand in the way of this one.
        execution = Execution(restart=True)
        remember(live.memory, live.encoder, stream, source_of_text(stream), execution=execution, check=self._go_on)
        self._follow(len(tokens))
        return len(tokens)

    def delete(self, name: str) -> int:
        """Returns how many documents of that name there were."""
        held = self._live.memory.entries().live_documents
        entries = sum(int(count) for known, count in zip(held.names, held.entries) if known == name)
        if not entries:
            raise Refused(404, f"the memory holds no document {name!r}")
        count = self._live.memory.forget([name])
        self._follow(entries)
        return count

    def _follow(self, changed: int) -> None:
        self._behind += changed
        if self._follows and self._behind > _BESIDE:
            self._live.search.searcher.catch_up()
            self._behind = 0


def document_routes(live: Live, desk: Desk) -> APIRouter:
    routes, shelf = APIRouter(prefix="/memory/documents"), Shelf(live, desk)

    @routes.get("")
    def documents(
        containing: str = "",
        limit: Annotated[int, Query(ge=0, le=_MOST)] = _MOST,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, Any]:
        """By a part of their names, oldest first."""
        entries = live.memory.entries()
        held, wanted = entries.live_documents, containing.casefold()
        found = [number for number, name in enumerate(held.names) if wanted in name.casefold()]
        return {
            "documents": [
                {"name": held.names[number], "entries": int(held.entries[number])}
                for number in islice(found, offset, offset + limit)
            ],
            "total": len(found),
            "entries": len(entries),
        }

    @routes.post("", status_code=201)
    async def add(document: NewDocument, request: Request) -> dict[str, Any]:
        entries = await desk.work(request.receive, lambda: shelf.add(document.name, document.text))
        return {"name": document.name, "entries": entries}

    async def delete(name: str, request: Request) -> dict[str, Any]:
        count = await desk.work(request.receive, lambda: shelf.delete(name))
        return {"name": name, "deleted": count}

    # As ?name= too: some clients tidy up a path in which there is a name such as "..".
    routes.delete("")(delete)
    routes.delete("/{name:anything}")(delete)
    return routes
