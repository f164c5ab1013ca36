"""Requests in, generation jobs out. What cannot be done is refused before it waits for the model."""

from collections.abc import Sequence
from dataclasses import replace

from spalm.generation import MemorySelection, Model
from spalm.generation.passages import RankedPassage, fit_passages, message_with_passages
from spalm.server.answers import GenerationJob, TokenisedPrompt
from spalm.server.errors import RequestRefused
from spalm.server.limits import Limits
from spalm.server.openai.chat_template import ChatTemplate
from spalm.server.openai.protocol import ChatMessage, ChatRequest, CompletionRequest, Prompt
from spalm.server.rights import Rights, selected_memories

_DEFAULT_TOKENS = 16
"""Highest number of tokens of a completion if the request has no `max_tokens`, as in OpenAI's API."""
_SHARE_OF_ANSWERS = 4
"""One in so many tokens of the context is left for an answer beside passages if the request does not say its length."""


class RequestParser:
    """Makes generation jobs from requests."""

    def __init__(self, model: Model, chat: ChatTemplate | None, limits: Limits):
        self._model, self._chat, self._limits = model, chat, limits
        self.context = limits.context if model.max_length is None else min(limits.context, model.max_length)
        """Highest number of tokens of a prompt and its answer together."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can take part in conversations."""
        return self._chat is not None and self._chat.exists

    def refuse_other_models(self, name: str | None) -> None:
        """Refuses a request for a model that is not served here."""
        if name not in (None, self._model.name):
            message = f"there is no model {name!r}; this server has {self._model.name!r}"
            raise RequestRefused(404, message, param="model", code="model_not_found")

    def parse_embedding(self, prompts: Sequence[Prompt]) -> tuple[list[str], int]:
        """Returns the texts to be embedded and the number of their tokens; refuses too many or too long ones."""
        self._refuse_too_many(len(prompts))
        tokeniser = self._model.tokeniser
        given = [self._checked(prompt, "input") for prompt in prompts]
        texts = [each if isinstance(each, str) else tokeniser.decode(each) for each in given]
        counts = [len(tokeniser.encode([text.encode()])[0]) for text in texts]
        if max(counts, default=0) > self.context:
            message = f"a text of {max(counts):,} tokens: {self.context:,} is the most"
            raise RequestRefused(400, message, param="input", code="context_length_exceeded")
        return texts, sum(counts)

    def parse_completion(
        self, request: CompletionRequest, rights: Rights, *, default_tokens: int | None = _DEFAULT_TOKENS
    ) -> GenerationJob:
        """Returns the job of a request for completions, whose key has these rights.

        `default_tokens` is the highest number of tokens if the request has none; None: as many as there is room for.
        """
        self.refuse_other_models(request.model)
        memories = selected_memories(self._model, request.memories, rights)
        given = request.prompts()
        self._refuse_too_many(len(given) * request.n)
        checked = [self._checked(prompt, "prompt") for prompt in given]
        passages, answer = request.passages, request.max_tokens if request.max_tokens is not None else default_tokens
        prompts = [
            self._with_passages(prompt, memories, passages, answer=answer)
            if passages and isinstance(prompt, str)
            else TokenisedPrompt.of(self._model.tokeniser, prompt)
            for prompt in checked
        ]
        room = self._room(max(len(prompt.tokens) for prompt in prompts), request.max_tokens, "prompt")
        count = min(default_tokens or room, room) if request.max_tokens is None else request.max_tokens
        job = GenerationJob(
            prompts=prompts,
            sampling=request.sampling(count) if count else None,
            n=request.n,
            echo=request.echo,
            likely=request.logprobs,
            use_memory=request.memory,
            memories=memories,
            cite=request.cite,
        )
        return self._bounded(job, may_shorten=request.max_tokens is None)

    def parse_chat(self, request: ChatRequest, rights: Rights) -> GenerationJob:
        """Returns the job of a request for a chat completion, whose key has these rights."""
        self.refuse_other_models(request.model)
        memories = selected_memories(self._model, request.memories, rights)
        if self._chat is None:
            message = f"{self._model.name} has no chat template; use /v1/completions"
            raise RequestRefused(400, message, code="no_chat_template")
        self._refuse_too_many(request.n)
        self._refuse_too_long(sum(len(message.text.encode()) for message in request.messages), "messages")
        count = request.max_completion_tokens or request.max_tokens
        prompt = self._chat_prompt(self._chat, request, memories, answer=count)
        room = self._room(len(prompt.tokens), count, "messages")
        job = GenerationJob(
            prompts=[prompt],
            sampling=request.sampling(count or room),
            n=request.n,
            likely=request.top_logprobs if request.logprobs else None,
            use_memory=request.memory,
            memories=memories,
            cite=request.cite,
        )
        return self._bounded(job, may_shorten=count is None)

    def _with_passages(
        self, prompt: str, memories: MemorySelection, count: int, *, answer: int | None
    ) -> TokenisedPrompt:
        """Returns a prompt with passages of memories before it, as many as there is room for beside an answer."""
        found = memories.passages(prompt, count)
        tokens, used = self._model.prompt_with_passages(prompt, found, self._room_for_prompt(answer))
        return TokenisedPrompt(tokens, passages=used)

    def _chat_prompt(
        self, chat: ChatTemplate, request: ChatRequest, memories: MemorySelection, *, answer: int | None
    ) -> TokenisedPrompt:
        """Returns a conversation as a prompt, with the passages that are asked for in the user's last message."""
        tokeniser, messages = self._model.tokeniser, request.messages
        if not request.passages:
            return chat.prompt(tokeniser, messages)
        asked = max((place for place, message in enumerate(messages) if message.role == "user"), default=None)

        def render(used: list[RankedPassage]) -> list[int]:
            given = list(messages)
            if asked is not None:
                content = message_with_passages(messages[asked].text, used)
                given[asked] = ChatMessage(role="user", content=content)
            return chat.prompt(tokeniser, given).tokens

        found = [] if asked is None else memories.passages(messages[asked].text, request.passages)
        tokens, used = fit_passages(found, render, tokeniser, room=self._room_for_prompt(answer))
        return TokenisedPrompt(tokens, passages=used)

    def _room_for_prompt(self, answer: int | None) -> int:
        """Returns how many tokens a prompt with passages may have beside an answer; None: of unknown length."""
        reserved = min(self.context // _SHARE_OF_ANSWERS, self._limits.max_tokens) if answer is None else answer
        return self.context - reserved

    def _bounded(self, job: GenerationJob, *, may_shorten: bool) -> GenerationJob:
        """Returns a job whose answers have a bounded size, if need be with shorter ones; refuses what is too much."""
        most, answers = self._limits.listed_tokens, len(job.prompts) * job.n
        if job.listed_tokens <= most:
            return job
        room = (most // (1 + (job.likely or 0)) - (job.n * job.prompt_tokens if job.echo else 0)) // answers
        if may_shorten and job.sampling is not None and room > 0:
            return replace(job, sampling=job.sampling.model_copy(update={"max_tokens": room}))
        message = (
            f"{answers} answers would list {job.listed_tokens:,} tokens, likely ones included: {most:,} is the most"
        )
        raise RequestRefused(400, f"{message}; ask for fewer (n, max_tokens, logprobs, echo)", param="max_tokens")

    def _refuse_too_long(self, size: int, param: str) -> None:
        """Refuses a text of `size` bytes that cannot be meant for the context; tokenising it would take long."""
        most = self.context * self._limits.token_bytes
        if size > most:
            message = (
                f"{param}: a text of {size:,} bytes; for a context of {self.context:,} tokens {most:,} is the most"
            )
            raise RequestRefused(400, message, param=param, code="context_length_exceeded")

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        """Returns a prompt; refuses what is too long, token ids that are not in the vocabulary, and invalid Unicode."""
        if isinstance(prompt, str):
            self._refuse_too_long(len(prompt.encode()), param)
            return prompt
        if len(prompt) > self.context:
            message = f"{param}: {len(prompt):,} tokens; {self.context:,} is the most"
            raise RequestRefused(400, message, param=param, code="context_length_exceeded")
        size = self._model.tokeniser.size
        wrong = [token for token in prompt if not 0 <= token < size]
        if wrong:
            message = f"{param}: there is no token {wrong[0]}; the vocabulary has {size:,}"
            raise RequestRefused(400, message, param=param)
        return prompt

    def _refuse_too_many(self, answers: int) -> None:
        if answers > self._limits.answers:
            message = f"{answers} answers are asked for; a request has at most {self._limits.answers}"
            raise RequestRefused(400, message, param="n")

    def _room(self, prompt: int, wanted: int | None, param: str) -> int:
        """Returns how many tokens may follow a prompt of `prompt` tokens; refuses a `wanted` number that is larger."""
        if prompt + (1 if wanted is None else wanted) > self.context:
            message = f"{prompt:,} tokens of prompt and {wanted or 1:,} to be written: {self.context:,} is the most"
            raise RequestRefused(400, message, param=param, code="context_length_exceeded")
        if wanted is not None and wanted > self._limits.max_tokens:
            message = f"max_tokens = {wanted:,}: this server writes at most {self._limits.max_tokens:,}"
            raise RequestRefused(400, message, param="max_tokens")
        return min(self.context - prompt, self._limits.max_tokens)
