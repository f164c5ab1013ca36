"""What the memory does at each token of a text, for programs; the explorer's page shows the same to people."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from spalm.generation.explorer import Explorer
from spalm.server.explorer.routes import Asking
from spalm.server.queue import Desk

Position = Annotated[int, Field(ge=0)]


class Explained(Asking):
    """A text, or by another name a prompt, and the positions whose neighbours are wanted."""

    text: str | None = None
    prompt: str | None = None
    position: Position | Annotated[list[Position], Field(max_length=100)] = []

    @model_validator(mode="after")
    def _one_text(self) -> "Explained":
        if (self.text is None) == (self.prompt is None):
            raise ValueError("give either a text or a prompt")
        return self


def explain(explorer: Explorer, speaker: str, asked: Explained) -> dict[str, Any]:
    """By the explorer's model of that name."""
    text = asked.prompt if asked.text is None else asked.text
    positions = asked.position if isinstance(asked.position, list) else [asked.position]
    assert text is not None
    passage = explorer.passage(text)
    scores = passage["models"][speaker]
    known = {"log_probability": "log_probabilities", "without_memory": "without_memory", "network": "network"}
    columns = {name: scores[key] for name, key in known.items() if key in scores}
    tokens = [dict(zip(("token", *columns), row)) for row in zip(passage["tokens"], *columns.values())]
    return {"tokens": tokens, "positions": [_position(explorer, speaker, text, position) for position in positions]}


def _position(explorer: Explorer, speaker: str, text: str, position: int) -> dict[str, Any]:
    found = explorer.token(text, position)
    kept = ("token", "distance", "document", "offset", "before", "after")
    return {
        "position": position,
        "token": found["shown"],
        "probability": found["probability"][speaker],
        "network": found["network"][speaker],
        "likely": [{"token": each["shown"], "probability": each["probability"]} for each in found["likely"][speaker]],
        "neighbours": [
            {**{name: each[name] for name in kept}, "weight": each["weights"].get(speaker, 0.0)}
            for each in found["neighbours"]
        ],
    }


def explain_routes(explorer: Explorer, speaker: str, desk: Desk) -> APIRouter:
    routes = APIRouter()

    @routes.post("/explain")
    async def explained(asked: Explained, request: Request) -> dict[str, Any]:
        return await desk.work(request.receive, lambda: explain(explorer, speaker, asked))

    return routes
