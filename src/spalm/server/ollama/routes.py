"""The routes that Ollama's clients use: /api."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from spalm.generation import Model
from spalm.server.answers import STREAMED, AnswerService, GenerationJob
from spalm.server.http import JsonRoute
from spalm.server.ollama.protocol import (
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    OllamaRequest,
    ShowRequest,
    with_tag,
    without_tag,
)
from spalm.server.ollama.responses import OllamaChatResponse, OllamaResponse
from spalm.server.openai.request_parser import RequestParser
from spalm.server.queue import RequestQueue
from spalm.server.rights import GivenRights, Rights

_VERSION = "0.12.0"
"""Version of Ollama whose API this is; clients ask for it."""


def ollama_routes(model: Model, parser: RequestParser, queue: RequestQueue, *, service: AnswerService) -> APIRouter:
    """Returns the routes below /api that Ollama's clients use."""
    routes = APIRouter(prefix="/api", route_class=JsonRoute)
    name = with_tag(model.name)
    details = {
        "format": "spalm",
        "family": "spalm",
        "families": ["spalm"],
        "parameter_size": "",
        "quantization_level": "",
    }
    started = datetime.now(UTC).isoformat()
    listed = {"name": name, "model": name, "modified_at": started, "size": 0, "digest": "", "details": details}

    @routes.get("/version")
    def version() -> dict[str, Any]:
        return {"version": _VERSION}

    @routes.get("/tags")
    def tags() -> dict[str, Any]:
        return {"models": [listed]}

    @routes.get("/ps")
    def loaded() -> dict[str, Any]:
        return {"models": [{**listed, "expires_at": started, "size_vram": 0}]}

    @routes.post("/show")
    def show(body: ShowRequest) -> dict[str, Any]:
        parser.refuse_other_models(without_tag(body.model or body.name))
        information = {"general.architecture": "spalm", "spalm.context_length": parser.context}
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": details,
            "model_info": information,
            "capabilities": ["completion", "embedding"],
            "modified_at": started,
        }

    @routes.post("/generate", responses=STREAMED["ndjson"])
    async def generate(body: GenerateRequest, request: Request, rights: GivenRights) -> Response:
        if not body.prompt and not body.system:  # clients do so to load a model
            parser.refuse_other_models(without_tag(body.model))
            return JSONResponse({"model": body.model, "created_at": started, "response": "", "done": True})
        return await answer(request, body, lambda: _job_of_text(parser, body, rights), form=OllamaResponse)

    @routes.post("/chat", responses=STREAMED["ndjson"])
    async def chat(body: OllamaChatRequest, request: Request, rights: GivenRights) -> Response:
        if not body.messages:
            parser.refuse_other_models(without_tag(body.model))
            empty = {"role": "assistant", "content": ""}
            return JSONResponse({"model": body.model, "created_at": started, "message": empty, "done": True})
        return await answer(request, body, lambda: parser.parse_chat(body.as_chat(), rights), form=OllamaChatResponse)

    @routes.post("/embed")
    async def embed(body: EmbedRequest, request: Request) -> dict[str, Any]:
        begun = time.perf_counter_ns()
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors, tokens = await embedded(request, body.model, texts)
        figures = {"total_duration": time.perf_counter_ns() - begun, "load_duration": 0, "prompt_eval_count": tokens}
        return {"model": body.model, "embeddings": vectors, **figures}

    @routes.post("/embeddings")
    async def embed_one(body: EmbedRequest, request: Request) -> dict[str, Any]:
        vectors, _ = await embedded(request, body.model, [body.prompt])
        return {"embedding": vectors[0]}

    async def embedded(request: Request, wanted: str, texts: list[str]) -> tuple[list[list[float]], int]:
        parser.refuse_other_models(without_tag(wanted))
        async with queue.turn(request.receive) as turn:
            _, tokens = await turn.prepare(lambda: parser.parse_embedding(texts))
            return await turn.run_each(model.embed, texts), tokens

    async def answer(
        request: Request, body: OllamaRequest, parse: Callable[[], GenerationJob], *, form: type[OllamaResponse]
    ) -> Response:
        stream = "ndjson" if body.stream else None
        searches = body.passages > 0
        return await service.respond(
            request, parse, lambda job: form(body.model, job), stream=stream, searches=searches
        )

    return routes


def _job_of_text(parser: RequestParser, body: GenerateRequest, rights: Rights) -> GenerationJob:
    """Returns the job of a request to /api/generate: a chat of one message, where the model has a template."""
    if body.raw or not parser.has_chat_template:
        return parser.parse_completion(body.as_completion(), rights, default_tokens=None)
    return parser.parse_chat(body.as_chat(), rights)
