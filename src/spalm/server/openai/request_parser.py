"""From requests to generation jobs. What cannot be done is refused before the request waits in the queue."""

from spalm.generation import Model
from spalm.server.answers import GenerationJob, TokenisedPrompt
from spalm.server.errors import RequestRefused
from spalm.server.limits import Limits
from spalm.server.openai.chat_template import ChatTemplate
from spalm.server.openai.protocol import ChatRequest, CompletionRequest, Prompt

_DEFAULT_TOKENS = 16
"""Highest number of tokens of a completion if the request has no `max_tokens`, as in OpenAI's API."""


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

    def count_tokens_to_embed(self, texts: list[str]) -> int:
        """Returns the number of tokens of all texts; refuses too many or too long ones."""
        self._refuse_too_many(len(texts))
        tokeniser = self._model.tokeniser
        counts = [len(tokeniser.encode([text.encode()])[0]) for text in texts]
        if max(counts, default=0) > self.context:
            message = f"a text of {max(counts):,} tokens: {self.context:,} is the most"
            raise RequestRefused(400, message, param="input", code="context_length_exceeded")
        return sum(counts)

    def parse_completion(
        self, request: CompletionRequest, default_tokens: int | None = _DEFAULT_TOKENS
    ) -> GenerationJob:
        """Returns the job of a request for completions.

        `default_tokens` is the highest number of tokens if the request has none; None: as many as there is room for.
        """
        self.refuse_other_models(request.model)
        given = request.prompts()
        self._refuse_too_many(len(given) * request.n)
        prompts = [TokenisedPrompt.of(self._model.tokeniser, self._checked(prompt)) for prompt in given]
        room = self._room(max(len(prompt.tokens) for prompt in prompts), request.max_tokens, "prompt")
        count = min(default_tokens or room, room) if request.max_tokens is None else request.max_tokens
        return GenerationJob(
            prompts=prompts,
            sampling=request.sampling(count) if count else None,
            n=request.n,
            echo=request.echo,
            likely=request.logprobs,
            use_memory=request.memory,
            cite=request.cite,
        )

    def parse_chat(self, request: ChatRequest) -> GenerationJob:
        """Returns the job of a request for a chat completion."""
        self.refuse_other_models(request.model)
        if self._chat is None:
            message = f"{self._model.name} has no chat template; use /v1/completions"
            raise RequestRefused(400, message, code="no_chat_template")
        self._refuse_too_many(request.n)
        prompt = self._chat.prompt(self._model.tokeniser, request.messages)
        count = request.max_completion_tokens or request.max_tokens
        room = self._room(len(prompt.tokens), count, "messages")
        return GenerationJob(
            prompts=[prompt],
            sampling=request.sampling(count or room),
            n=request.n,
            likely=request.top_logprobs if request.logprobs else None,
            use_memory=request.memory,
            cite=request.cite,
        )

    def _checked(self, prompt: Prompt) -> Prompt:
        """Returns a prompt; refuses token ids that are not in the vocabulary, and invalid Unicode."""
        if isinstance(prompt, str):
            prompt.encode()
            return prompt
        size = self._model.tokeniser.size
        wrong = [token for token in prompt if not 0 <= token < size]
        if wrong:
            message = f"prompt: there is no token {wrong[0]}; the vocabulary has {size:,}"
            raise RequestRefused(400, message, param="prompt")
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
