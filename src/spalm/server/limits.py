"""How much a server takes on."""

from pydantic import Field

from spalm.settings import Settings


class Limits(Settings):
    waiting: int = Field(default=16, gt=0)
    """Requests that may wait or be worked on; further ones get 429."""
    max_tokens: int = Field(default=2048, gt=0)
    """Tokens of an answer."""
    context: int = Field(default=32_768, gt=1)
    """Tokens of a prompt and its answer together; no more than the model can read in any case."""
    answers: int = Field(default=64, gt=0)
    """Answers in one request: prompts times n."""
    body_bytes: int = Field(default=8 << 20, gt=0)
    """Bytes of a request, such as a document to be remembered."""
