"""The server of a model with a memory: completions, documents, explanations, health and metrics.

    GET  /v1/models                    POST /v1/completions            POST /v1/chat/completions
    POST /v1/embeddings                /api: the routes of Ollama's clients
    GET  /memory                       the memories that are open
    GET  /memory/documents             POST /memory/documents          DELETE /memory/documents/NAME
    POST /explain                      GET  /health                    GET  /metrics
    /                                  the explorer's page, and its requests (/api)

Several answers are generated side by side, other requests wait in a queue; when it is full, further ones get 429.
Health, metrics and lists are answered without waiting.
"""

import time
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles

from spalm.generation import AnswerBatch, Model, ModelSet
from spalm.generation.inspection import Explorer
from spalm.lm import BatchReader
from spalm.server.answers import AnswerService
from spalm.server.documents import document_routes, memory_routes
from spalm.server.errors import REFUSALS, handle_errors
from spalm.server.explain import explain_routes
from spalm.server.explorer import PAGE, explorer_routes
from spalm.server.http import ApiKeyMiddleware, GuardMiddleware, HostMiddleware, Keys
from spalm.server.limits import Limits
from spalm.server.metrics import Metrics, MetricsMiddleware
from spalm.server.ollama import ollama_routes
from spalm.server.openai import ChatTemplate, openai_routes
from spalm.server.openai.request_parser import RequestParser
from spalm.server.queue import RequestQueue
from spalm.server.rights import GivenRights, readable_documents

_EXPLORER_LIMITS = Limits(waiting=64, body_bytes=1 << 20)


def make_server(
    model: Model,
    *,
    limits: Limits | None = None,
    key: str | None = None,
    keys: Keys | None = None,
    hosts: list[str] | None = None,
) -> FastAPI:
    """Returns the server of a model.

    `key` is a key that gives all rights, `keys` are further ones; without any, no key is needed. `hosts` are the host
    names by which the server may be reached, as `allowed_hosts` returns them; None: any.
    """
    if key is not None:
        keys = keys or Keys()
        keys.add(key)
    limits = limits or Limits()
    app, metrics = FastAPI(**_NO_DOCS), Metrics()
    model.models.variants()  # loads all networks now, not within a request
    if isinstance(model.network, BatchReader):
        model.network.reserve(limits.slots)
    batch = AnswerBatch(model, limits.slots)
    queue = app.state.queue = RequestQueue(limits.waiting, batch, limits.request_seconds)
    handle_errors(app)
    folder = model.models.chat_template_folder
    parser = RequestParser(model, None if folder is None else ChatTemplate(folder), limits)
    service = AnswerService(queue, metrics, model.tokeniser)
    for routes in (
        openai_routes(model, parser, queue, service=service),
        ollama_routes(model, parser, queue, service=service),
        memory_routes(model),
        document_routes(model, queue, limits),
        health_routes(model, queue),
    ):
        app.include_router(routes)

    def needs_own_memory(rights: GivenRights) -> None:
        readable_documents(model, None, rights)

    for routes in (
        explain_routes(model, queue),
        explorer_routes(model.explorer, queue),
        metrics_routes(model, queue, metrics),
    ):  # these show the texts of the directory, or count what its memory holds
        app.include_router(routes, dependencies=[Depends(needs_own_memory)])
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    app.state.limits, app.state.has_key = limits, keys is not None
    app.add_middleware(GuardMiddleware, limits=limits)
    if keys is not None:
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    app.add_middleware(HostMiddleware, hosts=hosts or ["*"])
    return app


def make_explorer_server(models: ModelSet, hosts: list[str]) -> FastAPI:
    """Returns a server of the explorer's page alone.

    `hosts` are the host names by which it may be reached. Others are refused, so that no page elsewhere can use it.
    """
    app, queue = FastAPI(**_NO_DOCS), RequestQueue(_EXPLORER_LIMITS.waiting, seconds=_EXPLORER_LIMITS.request_seconds)
    app.state.queue = queue
    handle_errors(app)
    models.variants()  # loads all networks now, not within a request
    app.include_router(explorer_routes(Explorer(models), queue))
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    app.state.limits, app.state.has_key = _EXPLORER_LIMITS, False
    app.add_middleware(GuardMiddleware, limits=_EXPLORER_LIMITS)
    app.add_middleware(HostMiddleware, hosts=hosts)
    return app


_DESCRIPTION: dict[str, Any] = {"title": "spalm", "responses": REFUSALS}
_NO_DOCS: dict[str, Any] = {**_DESCRIPTION, "docs_url": None, "redoc_url": None, "openapi_url": None}
"""FastAPI's own pages are off: they fetch scripts from elsewhere."""


def health_routes(model: Model, queue: RequestQueue) -> APIRouter:
    """Returns the route that says whether the server is up."""
    routes = APIRouter()
    thread = CapacityLimiter(1)  # other requests may use up the threads that they share

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        state = "stopping" if queue.closed else "ok"
        entries = await to_thread.run_sync(lambda: len(model.memory), limiter=thread)
        return {"status": state, "model": model.name, "entries": entries}

    return routes


def metrics_routes(model: Model, queue: RequestQueue, metrics: Metrics) -> APIRouter:
    """Returns the route for the counters of the server; what it says of the memory is of the directory's own."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse)
    def show_metrics() -> PlainTextResponse:
        entries = model.store.entries()
        searched = model.search.searcher.searched if model.models.has_keys else 0
        figures = {
            "spalm_tokens_read_total": ("Tokens of prompts.", metrics.prompt_tokens),
            "spalm_tokens_written_total": ("Tokens of answers.", metrics.generated_tokens),
            "spalm_searches_total": ("Keys that the memory was searched for.", searched),
            "spalm_refused_total": ("Requests refused because the queue was full.", queue.refused),
            "spalm_left_total": ("Requests whose clients left before the end.", queue.departed),
            "spalm_waiting": ("Requests that wait or are worked on.", queue.size),
            "spalm_entries": ("Entries of the memory.", len(entries)),
            "spalm_documents": ("Documents of the memory.", len(entries.live_documents)),
            "spalm_uptime_seconds": ("Seconds since the server began.", time.time() - metrics.started),
        }
        return PlainTextResponse(metrics.in_prometheus_form(figures))

    return routes
