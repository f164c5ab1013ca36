"""Generated text: its tokens, the pieces in which it is streamed, and where it comes from."""

from dataclasses import dataclass, field
from typing import Literal

from spalm.generation.passages.ranking import RankedPassage

FinishReason = Literal["stop", "length"]
"""Why an answer ended: at an end token or a stop text, or because it had as many tokens as it may."""


@dataclass(frozen=True)
class CitedSource:
    """A place in the memory that proposed a token."""

    document: str
    """Name of the document."""
    offset: int
    """Position in the document, in tokens."""
    weight: float
    """Weight of the proposal, added up over the tokens of a citation."""
    memory: str = ""
    """Name of the memory that holds the document."""


@dataclass(frozen=True)
class Citation:
    """A part of an answer that the memory decided, with its sources, the strongest first."""

    start: int
    """First character of the part in the answer."""
    end: int
    """Character after the last of the part."""
    sources: list[CitedSource]

    @property
    def span(self) -> tuple[int, int]:
        """The part as (start, end), in characters of the answer."""
        return self.start, self.end

    @property
    def document(self) -> str:
        """Name of the strongest source's document."""
        return self.sources[0].document

    @property
    def memory(self) -> str:
        """Name of the memory that holds that document."""
        return self.sources[0].memory

    @property
    def offset(self) -> int:
        """Position in the strongest source's document, in tokens."""
        return self.sources[0].offset

    @property
    def weight(self) -> float:
        """Weight of the strongest source."""
        return self.sources[0].weight


@dataclass(frozen=True)
class GeneratedToken:
    """One token of an answer, or of a prompt that is echoed."""

    id: int
    text: str
    """Text that the token adds; empty while a character is not complete, and for a token that ends the answer."""
    log_probability: float | None
    """Log-probability of the token; None for the first token of a prompt, which nothing precedes."""
    memory_share: float = 0.0
    """Share of the token's probability that came from the memory."""
    sources: list[CitedSource] = field(default_factory=list)
    """Places in the memory that proposed the token."""
    continues: bool = False
    """Whether the first source is the place after that of the token before: the text goes on word for word there."""
    drafted: bool = False
    """Whether the token was guessed from the memory before it was predicted."""
    likely: list[tuple[int, float]] = field(default_factory=list)
    """The likeliest tokens at this place and their log-probabilities."""
    finish_reason: FinishReason | None = None
    """Why the answer ended; set on the last token only."""


@dataclass(frozen=True)
class Chunk:
    """One step of a streamed answer: the text that is certain by then, and the tokens that end with it."""

    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """Why the answer ended; set on the last chunk only."""
    citations: list[Citation] | None = None
    """Citations of the whole answer; set on the last chunk only, if they were asked for."""
    passages: list[RankedPassage] | None = None
    """Passages of the memory that are in the prompt, best first; set by `Model.stream`, on the last chunk only."""
    generated: int = 0
    """Number of tokens that the model generated in this step, shown or cut off."""
    choice: int = 0
    """Number of the answer, where several are generated."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    tokens: list[GeneratedToken]
    finish_reason: FinishReason
    citations: list[Citation]
    """Parts of the text that the memory decided, with their sources."""
    passages: list[RankedPassage] = field(default_factory=list)
    """Passages of the memory that are in the prompt, best first."""
