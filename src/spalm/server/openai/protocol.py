"""Requests for completions, in the form of OpenAI's clients.

Fields that should change the answer but are not supported are refused; other unknown fields are ignored, because
clients send many.
"""

import base64
import struct
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spalm.choices import LARGEST, MOST_PASSAGES
from spalm.generation import Sampling
from spalm.server.http.fields import Integer, Items, Name, NoBiases, NonNegative, Nothing, TokenId

_ALMOST_ZERO = 1e-4
"""Temperature below which the likeliest token is always taken."""

Zero = Annotated[float, Field(ge=0, le=0)]
StopText = Annotated[str, Field(max_length=1000)]
PassageCount = Annotated[int, Field(ge=0, le=MOST_PASSAGES)]
"""Number of passages of the memory that are put into the prompt."""
MemoryNames = Annotated[Items[Name], Field(max_length=1024)]
"""Names of memories."""
Prompt = str | list[int]
"""A text, or token ids."""
Prompts = str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
"""A prompt, or a list of prompts."""


def as_list(given: Any) -> list[Prompt]:
    """Returns what was given as prompts as a list of prompts."""
    one = isinstance(given, str) or not given or isinstance(given[0], int)
    return [given] if one else list(given)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


def _describe_nulls(form: dict[str, Any]) -> None:
    """Says in the description of a request that its fields may be null, unless they are required."""
    for name, field in form.get("properties", {}).items():
        if name not in form.get("required", []):
            form["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class ClientRequest(BaseModel):
    """A request of a client. Unknown fields are ignored, and null means the default, as clients mean it."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, json_schema_extra=_describe_nulls)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class GenerationRequest(ClientRequest):
    """Fields that requests for completions and for chat completions share."""

    model: Name | None = None
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: NonNegative = 0
    stop: StopText | Annotated[Items[StopText], Field(max_length=16)] = []
    seed: Integer | None = None
    n: int = Field(default=1, ge=1, le=LARGEST)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: NoBiases = {}
    memory: bool = True
    """Whether the memory is used. This field is not OpenAI's."""
    memories: MemoryNames | None = None
    """Names of the memories that are used; by default all that the key may use. This field is not OpenAI's."""
    cite: bool = False
    """Whether to list the parts that the memory decided, and their sources. This field is not OpenAI's."""
    passages: PassageCount = 0
    """Number of passages of the memory that are put into the prompt. This field is not OpenAI's."""

    def sampling(self, max_tokens: int) -> Sampling:
        """Returns how tokens are picked for an answer of at most `max_tokens` tokens."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return Sampling(
            max_tokens=max_tokens,
            temperature=0 if self.temperature < _ALMOST_ZERO else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=[stop for stop in stops if stop],
            seed=self.seed,
        )


class CompletionRequest(GenerationRequest):
    """A request to /v1/completions."""

    prompt: Prompts = ""
    max_tokens: NonNegative | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    best_of: Integer | None = None
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _no_best_of(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: answers are not compared with one another; leave it out")
        return self

    @model_validator(mode="after")
    def _passages_before_texts(self) -> "CompletionRequest":
        if self.passages and self.echo:
            raise ValueError("echo: a prompt with passages is not the one that was sent; leave out one of the two")
        if self.passages and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise ValueError("passages: they are put before a text; give the prompt as text, not as tokens")
        return self

    def prompts(self) -> list[Prompt]:
        """Returns the prompts as a list."""
        return as_list(self.prompt)


class TextPart(BaseModel):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: str
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        """The text of the whole message."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(BaseModel):
    """The form of an answer; only text is supported."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """A request to /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Nothing = []
    functions: Nothing = []


class EmbeddingRequest(BaseModel):
    """A request to /v1/embeddings."""

    model_config = ConfigDict(extra="ignore")
    model: Name | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None

    def prompts(self) -> list[Prompt]:
        """Returns the texts or token ids as a list."""
        return as_list(self.input)

    def encoded(self, vector: list[float]) -> list[float] | str:
        """Returns a vector in the form that was asked for."""
        if self.encoding_format == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
