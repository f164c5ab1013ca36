"""The part of the server that OpenAI's clients know: /v1."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from spalm.generation.model import Live
from spalm.server.errors import Refused
from spalm.server.limits import Limits
from spalm.server.metrics import Counts
from spalm.server.openai.chat_template import ChatTemplate
from spalm.server.openai.completions import ChatForm, Order, Piece, Prompt, TextForm, fill
from spalm.server.openai.protocol import Asked, ChatAsked, CompletionAsked
from spalm.server.queue import Desk
from spalm.server.streaming import Streamed

_USUAL = 16
"""Tokens of a completion if nobody says how many."""


def openai_routes(live: Live, chat: ChatTemplate | None, desk: Desk, limits: Limits, counts: Counts) -> APIRouter:
    routes, kitchen = APIRouter(prefix="/v1"), Kitchen(live, chat, limits)
    about = {"id": live.name, "object": "model", "created": int(counts.started), "owned_by": "spalm"}

    @routes.get("/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @routes.get("/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        kitchen.refuse_others(name)
        return about

    @routes.post("/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        order = await run_in_threadpool(kitchen.order_of_text, asked)
        return await answer(request, asked, order, TextForm(live.name, live.tokeniser, order))

    @routes.post("/chat/completions")
    async def chat_completions(asked: ChatAsked, request: Request) -> Response:
        order = await run_in_threadpool(kitchen.order_of_chat, asked)
        return await answer(request, asked, order, ChatForm(live.name, live.tokeniser, order))

    async def answer(request: Request, asked: Asked, order: Order, form: TextForm) -> Response:
        steps = _counted(fill(live, order), order, counts)
        if asked.stream:
            return Streamed(desk, _chunks(steps, form, asked.stream_options.include_usage))
        async with desk.turn(request.receive):
            parts = [part async for part in desk.steps(steps)]
        return JSONResponse(form.whole(parts))

    return routes


def _counted(steps: Iterator[Piece], order: Order, counts: Counts) -> Iterator[Piece]:
    counts.read += order.read
    for piece in steps:
        counts.written += piece.written
        yield piece


def _chunks(steps: Iterator[Piece], form: TextForm, include_usage: bool) -> Iterator[list[dict[str, Any]]]:
    for piece in steps:
        yield list(form.chunks(piece))
    if include_usage:
        yield [form.last_chunk()]


class Kitchen:
    """Makes orders of what is asked, and refuses what cannot be had. It is checked before anybody waits in line."""

    def __init__(self, live: Live, chat: ChatTemplate | None, limits: Limits):
        self._live, self._chat, self._limits = live, chat, limits
        self._context = limits.context if live.longest is None else min(limits.context, live.longest)

    def refuse_others(self, model: str | None) -> None:
        if model not in (None, self._live.name):
            message = f"there is no model {model!r}; this server has {self._live.name!r}"
            raise Refused(404, message, "model", "model_not_found")

    def order_of_text(self, asked: CompletionAsked) -> Order:
        self.refuse_others(asked.model)
        prompts = asked.prompts()
        self._refuse_many(len(prompts) * asked.n)
        read = [Prompt.of(self._live.tokeniser, self._known(prompt)) for prompt in prompts]
        longest = max(len(prompt.tokens) for prompt in read)
        room = self._room(longest, asked.max_tokens, "prompt")
        wanted = min(_USUAL, room) if asked.max_tokens is None else asked.max_tokens
        return Order(
            prompts=read,
            sampling=asked.sampling(wanted) if wanted else None,
            each=asked.n,
            echo=asked.echo,
            likely=asked.logprobs,
            use_memory=asked.memory,
            cite=asked.cite,
        )

    def order_of_chat(self, asked: ChatAsked) -> Order:
        self.refuse_others(asked.model)
        if self._chat is None:
            raise Refused(400, f"{self._live.name} has no chat template; use /v1/completions", code="no_chat_template")
        self._refuse_many(asked.n)
        prompt = self._chat.prompt(self._live.tokeniser, asked.messages)
        wanted = asked.max_completion_tokens or asked.max_tokens
        room = self._room(len(prompt.tokens), wanted, "messages")
        return Order(
            prompts=[prompt],
            sampling=asked.sampling(wanted or room),
            each=asked.n,
            likely=asked.top_logprobs if asked.logprobs else None,
            use_memory=asked.memory,
            cite=asked.cite,
        )

    def _known(self, prompt: str | list[int]) -> str | list[int]:
        if isinstance(prompt, str):
            prompt.encode()  # half a letter is refused here
            return prompt
        size = self._live.tokeniser.size
        wrong = [token for token in prompt if not 0 <= token < size]
        if wrong:
            raise Refused(400, f"prompt: there is no token {wrong[0]}; the vocabulary has {size:,}", "prompt")
        return prompt

    def _refuse_many(self, answers: int) -> None:
        if answers > self._limits.answers:
            raise Refused(400, f"{answers} answers are asked for; a request has at most {self._limits.answers}", "n")

    def _room(self, prompt: int, wanted: int | None, param: str) -> int:
        """Tokens that may be written after a prompt; refuses a number that is too large."""
        if prompt + (1 if wanted is None else wanted) > self._context:
            message = f"{prompt:,} tokens of prompt and {wanted or 1:,} to be written: {self._context:,} is the most"
            raise Refused(400, message, param, "context_length_exceeded")
        if wanted is not None and wanted > self._limits.max_tokens:
            message = f"max_tokens = {wanted:,}: this server writes at most {self._limits.max_tokens:,}"
            raise Refused(400, message, "max_tokens")
        return min(self._context - prompt, self._limits.max_tokens)
