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
    token_bytes: int = Field(default=32, gt=0)
    """Highest number of bytes of a prompt for each token of the context; longer ones are refused untokenised."""
    answers: int = Field(default=64, gt=0)
    """Highest number of answers in one request: prompts times n."""
    listed_tokens: int = Field(default=131_072, gt=0)
    """Highest number of tokens that a request gets back: of all answers, with echo and `logprobs` likely ones each."""
    request_seconds: float = Field(default=900, gt=0)
    """Seconds after which a request is ended: answers with what they have, other work with 503."""
    body_bytes: int = Field(default=8 << 20, gt=0)
    """Highest number of bytes of a request."""
    document_bytes: int = Field(default=1 << 20, gt=0)
    """Highest number of bytes of a document's text: while it is read, the model does little else."""
    all_body_bytes: int = Field(default=64 << 20, gt=0)
    """Highest number of bytes of all requests that the server holds at a time; further ones get 429."""
    header_seconds: float = Field(default=10, gt=0)
    """Seconds in which the headers of a request must arrive."""
    body_seconds: float = Field(default=60, gt=0)
    """Seconds in which the body of a request must arrive, and in which a finished answer must be read."""
    connections: int = Field(default=256, gt=0)
    """Highest number of open connections; lower where the system allows few open files."""
