"""The routes that OpenAI's clients use: /v1."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from spalm.generation import Chunk, Model
from spalm.server.metrics import Metrics
from spalm.server.openai.jobs import GenerationJob
from spalm.server.openai.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationRequest
from spalm.server.openai.request_parser import RequestParser
from spalm.server.openai.responses import ChatResponse, CompletionResponse
from spalm.server.queue import RequestQueue
from spalm.server.streaming import StreamedResponse


def openai_routes(model: Model, parser: RequestParser, queue: RequestQueue, metrics: Metrics) -> APIRouter:
    """Returns the routes below /v1."""
    routes = APIRouter(prefix="/v1")
    description = {"id": model.name, "object": "model", "created": int(metrics.started), "owned_by": "spalm"}

    @routes.get("/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [description]}

    @routes.get("/models/{name:path}")
    def show_model(name: str) -> dict[str, Any]:
        parser.refuse_other_models(name)
        return description

    @routes.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        job = await run_in_threadpool(parser.parse_completion, body)
        return await answer(request, body, job, CompletionResponse(model.name, model.tokeniser, job))

    @routes.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        job = await run_in_threadpool(parser.parse_chat, body)
        return await answer(request, body, job, ChatResponse(model.name, model.tokeniser, job))

    @routes.post("/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        parser.refuse_other_models(body.model)
        texts = body.texts(model.tokeniser)
        tokens = parser.count_tokens_to_embed(texts)
        vectors = await queue.run(request.receive, lambda: [model.embed(text) for text in texts])
        found = [
            {"object": "embedding", "index": number, "embedding": body.encoded(vector)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": found, "model": model.name, "usage": usage}

    async def answer(
        request: Request, body: GenerationRequest, job: GenerationJob, response: CompletionResponse
    ) -> Response:
        steps = metrics.counted(job.run(model), job.prompt_tokens)
        if body.stream:
            chunks = _streamed(steps, response, include_usage=body.stream_options.include_usage)
            return StreamedResponse(queue, chunks)
        async with queue.turn(request.receive):
            parts = [part async for part in queue.steps(steps)]
        return JSONResponse(response.whole(parts))

    return routes


def _streamed(
    chunks: Iterator[Chunk], response: CompletionResponse, *, include_usage: bool
) -> Iterator[list[dict[str, Any]]]:
    """Yields the events of a streamed answer, a list for each chunk; the last with the usage if it is wanted."""
    for chunk in chunks:
        yield list(response.chunks(chunk))
    if include_usage:
        yield [response.last_chunk()]
