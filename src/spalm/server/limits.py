"""Limits on the requests that a server accepts."""

from pydantic import Field

from spalm.settings import Settings


class Limits(Settings):
    """Limits on the requests that a server accepts."""

    slots: int = Field(default=4, gt=0)
    """Number of answers that are generated side by side; each takes memory for a text of the longest length."""
    waiting: int = Field(default=64, gt=0)
    """Number of requests that may wait or be worked on; further ones get 429."""
    max_tokens: int = Field(default=2048, gt=0)
    """Highest number of tokens of an answer."""
    context: int = Field(default=32_768, gt=1)
    """Highest number of tokens of a prompt and its answer together; never more than the model can read."""
    answers: int = Field(default=64, gt=0)
    """Highest number of answers in one request: prompts times n."""
    body_bytes: int = Field(default=8 << 20, gt=0)
    """Highest number of bytes of a request, such as a document to be remembered."""
