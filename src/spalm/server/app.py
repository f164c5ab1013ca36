"""The server of a model with a memory: completions, documents, explanations, health and metrics.

    GET  /v1/models                    POST /v1/completions            POST /v1/chat/completions
    GET  /memory/documents             POST /memory/documents          DELETE /memory/documents/NAME
    POST /explain                      GET  /health                    GET  /metrics
    /                                  the explorer's page, and what it asks (/api)

One request is worked on at a time, others wait in line; when that is full they get 429. What needs no work (health,
metrics, lists) does not wait.
"""

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import PlainTextResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from spalm.attachment import Attached, is_attached
from spalm.compute import Hardware
from spalm.errors import InputError
from spalm.generation.attached_variants import explorer_of
from spalm.generation.explorer import Explorer
from spalm.generation.model import OWN_MODELS, Live, live_attached, open_live
from spalm.generation.run_variants import open_explorer
from spalm.runs import FinishedRun
from spalm.server.auth import KeyCheck
from spalm.server.documents import document_routes
from spalm.server.explain import explain_routes
from spalm.server.explorer.routes import PAGE, Guard, explorer_routes, new_app
from spalm.server.limits import Limits
from spalm.server.metrics import Counting, Counts, in_prometheus_form
from spalm.server.openai.chat_template import ChatTemplate
from spalm.server.openai.routes import openai_routes
from spalm.server.queue import Desk

_USUAL = Limits()


def open_server(
    directory: Path | str,
    hardware: Hardware,
    model: str | None = None,
    limits: Limits = _USUAL,
    key: str | None = None,
    hosts: list[str] | None = None,
) -> FastAPI:
    """For what `spalm attach` made, or a finished run with one of its models."""
    directory = Path(directory)
    if is_attached(directory) and model is None:
        return server_of(Attached(directory, hardware), limits, key, hosts)
    live = open_live(directory, hardware, model)
    return make_server(
        live, open_explorer(FinishedRun(directory), hardware), model or OWN_MODELS[0], None, limits, key, hosts
    )


def server_of(
    attached: Attached, limits: Limits = _USUAL, key: str | None = None, hosts: list[str] | None = None
) -> FastAPI:
    """For an attached model as it stands, with another search than its own if it was given one."""
    parts = live_attached(attached), explorer_of(attached), attached.settings.combiner
    return make_server(*parts, ChatTemplate(attached.directory), limits, key, hosts)


def make_server(
    live: Live,
    explorer: Explorer,
    speaker: str,
    chat: ChatTemplate | None = None,
    limits: Limits = _USUAL,
    key: str | None = None,
    hosts: list[str] | None = None,
) -> FastAPI:
    """`speaker`: what the explorer calls the model that is served. `hosts`: the names by which the server may be
    called, as `allowed_hosts` gives them; None: any."""
    if key == "":
        raise InputError("the key is empty; give one that nobody guesses, or none")
    app, desk = new_app(limits.waiting)
    counts = Counts()
    for routes in (
        openai_routes(live, chat, desk, limits, counts),
        document_routes(live, desk),
        explain_routes(explorer, speaker, desk),
        explorer_routes(explorer, desk),
        state_routes(live, desk, counts),
    ):
        app.include_router(routes)
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    app.add_middleware(Guard, body_bytes=limits.body_bytes)
    if key is not None:
        app.add_middleware(KeyCheck, key=key)
    app.add_middleware(Counting, counts=counts)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["*"])
    return app


def state_routes(live: Live, desk: Desk, counts: Counts) -> APIRouter:
    """How the server is."""
    routes = APIRouter()

    @routes.get("/health")
    def health() -> dict[str, Any]:
        state = "stopping" if desk.closed else "ok"
        return {"status": state, "model": live.name, "entries": len(live.memory.entries())}

    @routes.get("/metrics")
    def metrics() -> PlainTextResponse:
        entries = live.memory.entries()
        return PlainTextResponse(
            in_prometheus_form(
                counts,
                {
                    "spalm_tokens_read_total": ("Tokens of prompts.", counts.read),
                    "spalm_tokens_written_total": ("Tokens of answers.", counts.written),
                    "spalm_searches_total": ("Keys that the memory was searched for.", live.search.searcher.searched),
                    "spalm_refused_total": ("Requests turned away because the line was full.", desk.turned_away),
                    "spalm_left_total": ("Requests whose clients left before the end.", desk.left),
                    "spalm_waiting": ("Requests that wait or are worked on.", desk.line),
                    "spalm_entries": ("Entries of the memory.", len(entries)),
                    "spalm_documents": ("Documents of the memory.", len(entries.live_documents)),
                    "spalm_uptime_seconds": ("Seconds since the server began.", time.time() - counts.started),
                },
            )
        )

    return routes
