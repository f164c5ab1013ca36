"""Explanations of what the memory does at each token of a text, over HTTP."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from spalm.generation import Model
from spalm.generation.inspection import explain_position, explain_tokens
from spalm.server.http import JsonRoute
from spalm.server.http.fields import ClosedForm, Items, NonNegative
from spalm.server.queue import RequestQueue


class ExplainRequest(ClosedForm):
    """A text, which may also be called `prompt`, and the positions whose neighbours are wanted."""

    text: str | None = None
    prompt: str | None = None
    position: NonNegative | Annotated[Items[NonNegative], Field(max_length=100)] = []

    @model_validator(mode="after")
    def _one_text(self) -> "ExplainRequest":
        if (self.text is None) == (self.prompt is None):
            raise ValueError("give either a text or a prompt")
        return self

    @property
    def given(self) -> str:
        """The text, given as `text` or as `prompt`."""
        return self.text if self.text is not None else self.prompt or ""

    @property
    def positions(self) -> list[int]:
        """The positions as a list."""
        return self.position if isinstance(self.position, list) else [self.position]


def explain_routes(model: Model, queue: RequestQueue) -> APIRouter:
    """Returns the route /explain."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/explain")
    async def explain(body: ExplainRequest, request: Request) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            explorer, name, text = model.explorer, model.variant.name, body.given
            tokens = explain_tokens(explorer, name, text)
            positions = [asdict(explain_position(explorer, name, text, position=each)) for each in body.positions]
            return {"tokens": tokens, "positions": positions}

        return await queue.run(request.receive, work)

    return routes
