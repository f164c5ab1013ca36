"""The routes that OpenAI's clients use: /v1."""

import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from spalm.generation import Model
from spalm.server.answers import STREAMED, AnswerService, GenerationJob
from spalm.server.http import JsonRoute
from spalm.server.openai.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationRequest
from spalm.server.openai.request_parser import RequestParser
from spalm.server.openai.responses import ChatResponse, CompletionResponse
from spalm.server.queue import RequestQueue
from spalm.server.rights import GivenRights


def openai_routes(model: Model, parser: RequestParser, queue: RequestQueue, *, service: AnswerService) -> APIRouter:
    """Returns the routes below /v1."""
    routes = APIRouter(prefix="/v1", route_class=JsonRoute)
    description = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "spalm"}

    @routes.get("/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [description]}

    @routes.get("/models/{name:path}")
    def show_model(name: str) -> dict[str, Any]:
        parser.refuse_other_models(name)
        return description

    @routes.post("/completions", responses=STREAMED["events"])
    async def completions(body: CompletionRequest, request: Request, rights: GivenRights) -> Response:
        return await answer(request, body, lambda: parser.parse_completion(body, rights), form=CompletionResponse)

    @routes.post("/chat/completions", responses=STREAMED["events"])
    async def chat_completions(body: ChatRequest, request: Request, rights: GivenRights) -> Response:
        return await answer(request, body, lambda: parser.parse_chat(body, rights), form=ChatResponse)

    @routes.post("/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        parser.refuse_other_models(body.model)
        async with queue.turn(request.receive) as turn:
            texts, tokens = await turn.prepare(lambda: parser.parse_embedding(body.prompts()))
            vectors = await turn.run_each(model.embed, texts)
        found = [
            {"object": "embedding", "index": number, "embedding": body.encoded(vector)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": found, "model": model.name, "usage": usage}

    async def answer(
        request: Request,
        body: GenerationRequest,
        parse: Callable[[], GenerationJob],
        *,
        form: type[CompletionResponse],
    ) -> Response:
        usage = body.stream_options.include_usage

        def form_of(job: GenerationJob) -> CompletionResponse:
            return form(model.name, model.tokeniser, job, include_usage=usage)

        stream = "events" if body.stream else None
        return await service.respond(request, parse, form_of, stream=stream, searches=body.passages > 0)

    return routes
