"""What completions are asked for with, in the form of OpenAI's clients.

Fields that would change the answer, and cannot, are refused; others that are not known are left alone, for clients send
many.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from spalm.generation.generate import Sampling

_ALMOST_NOTHING = 1e-4
"""Below this temperature the likeliest token is all that is left."""
_SEED = 1 << 63

Nothing = Annotated[float, Field(ge=0, le=0)]
Stop = Annotated[str, Field(max_length=1000)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of completions share."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = []
    seed: int | None = Field(default=None, ge=-_SEED, lt=_SEED)
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    frequency_penalty: Nothing = 0
    presence_penalty: Nothing = 0
    logit_bias: dict[str, Nothing] = {}
    memory: bool = True
    """Ours: false answers without the memory."""
    cite: bool = False
    """Ours: name the parts that the memory decided, and their sources."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, given: Any) -> Any:
        """Clients write null where they mean the default."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    def sampling(self, max_tokens: int) -> Sampling:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return Sampling(
            max_tokens=max_tokens,
            temperature=0 if self.temperature < _ALMOST_NOTHING else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=[stop for stop in stops if stop],
            seed=self.seed,
        )


class CompletionAsked(Asked):
    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]] = ""
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _best_are_all(self) -> "CompletionAsked":
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: answers are not compared with one another; leave it out")
        return self

    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return [given]  # type: ignore[list-item]
        return list(given)  # type: ignore[arg-type]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(BaseModel):
    type: Literal["text"]


class ChatAsked(Asked):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] = []
    functions: Annotated[list[Any], Field(max_length=0)] = []
