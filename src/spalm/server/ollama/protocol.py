"""Requests in the form of Ollama's clients, and what they are in OpenAI's form.

Fields that should change the answer but are not supported are refused; other unknown fields are ignored.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from spalm.server.http.fields import Integer, Items, Name, Nothing
from spalm.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    ClientRequest,
    CompletionRequest,
    MemoryNames,
    PassageCount,
    StopText,
)

_TAG = ":latest"
"""Tag that Ollama's clients add to names without one."""


class Options(BaseModel):
    """How tokens are picked, with Ollama's defaults."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    temperature: float = 0.8
    top_p: float = 0.9
    top_k: Integer = 40
    num_predict: Integer = -1
    """Highest number of tokens of the answer; below 1: as many as there is room for."""
    stop: StopText | Items[StopText] = []
    seed: Integer | None = None

    def in_openai_form(self) -> dict[str, Any]:
        """Returns the same as fields of a request in OpenAI's form."""
        given = self.model_dump(exclude={"num_predict"})
        return {**given, "max_tokens": self.num_predict if self.num_predict > 0 else None}


class OllamaRequest(ClientRequest):
    """Fields that all requests for text share."""

    model: Name
    stream: bool = True
    options: Options = Options()
    format: Literal[""] | None = None
    memory: bool = True
    """Whether the memory is used. This field is not Ollama's."""
    memories: MemoryNames | None = None
    """Names of the memories that are used; by default all that the key may use. This field is not Ollama's."""
    cite: bool = False
    """Whether to list the parts that the memory decided, and their sources. This field is not Ollama's."""
    passages: PassageCount = 0
    """Number of passages of the memory that are put into the prompt. This field is not Ollama's."""

    def _common(self) -> dict[str, Any]:
        """Returns the fields that requests in OpenAI's form share."""
        return {
            "model": without_tag(self.model),
            "memory": self.memory,
            "memories": self.memories,
            "cite": self.cite,
            "passages": self.passages,
            **self.options.in_openai_form(),
        }


class GenerateRequest(OllamaRequest):
    """A request to /api/generate."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    """Whether the prompt is taken as it is. If not, it is a message in a chat, provided the model has a template."""
    suffix: Literal[""] = ""
    images: Nothing = []

    def as_completion(self) -> CompletionRequest:
        """Returns the request in OpenAI's form, for the text as it is."""
        return CompletionRequest.model_validate({**self._common(), "prompt": self.system + self.prompt})

    def as_chat(self) -> ChatRequest:
        """Returns the request in OpenAI's form, as a chat of one message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return ChatRequest.model_validate({**self._common(), "messages": messages})


class OllamaMessage(ChatMessage):
    """A message of a conversation; only text is supported."""

    images: Nothing | None = None
    tool_calls: Nothing | None = None


class OllamaChatRequest(OllamaRequest):
    """A request to /api/chat."""

    messages: Items[OllamaMessage] = []
    tools: Nothing = []

    def as_chat(self) -> ChatRequest:
        """Returns the request in OpenAI's form."""
        messages = [message.model_dump(include={"role", "content"}) for message in self.messages]
        return ChatRequest.model_validate({**self._common(), "messages": messages})


class ShowRequest(BaseModel):
    """A request to /api/show."""

    model: Name = ""
    name: Name = ""
    """The older name of `model`."""


class EmbedRequest(BaseModel):
    """A request to /api/embed, or with `prompt` to the older /api/embeddings."""

    model_config = ConfigDict(extra="ignore")
    model: Name
    input: str | Items[str] = []
    prompt: str = ""


def without_tag(name: str) -> str:
    """Returns a model's name without the tag that clients add."""
    return name.removesuffix(_TAG)


def with_tag(name: str) -> str:
    """Returns a model's name as Ollama lists it."""
    return name if ":" in name else name + _TAG
