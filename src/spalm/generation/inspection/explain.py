"""Explanations of what the memory does at each token of a text, for programs; the explorer's page shows the same."""

from dataclasses import dataclass
from typing import Any

from spalm.generation.inspection.explorer import Explorer


@dataclass(frozen=True)
class LikelyToken:
    """A token that the model thought likely."""

    token: str
    probability: float


@dataclass(frozen=True)
class ExplainedNeighbour:
    """An entry of the memory that was near or follows an exact match, and where it comes from."""

    token: str
    """The token that followed the entry."""
    document: str
    offset: int
    """Position in the document, in tokens."""
    before: str
    """Text before the entry."""
    after: str
    """Text after the token."""
    weight: float
    """Weight of the entry within the memory's share."""
    distance: float | None = None
    """Squared distance of the entry's key; None for a place of an exact match."""


@dataclass(frozen=True)
class ExplainedMatch:
    """A piece of text before a position that stands word for word in the memory."""

    text: str
    length: int
    """Number of its tokens."""
    count: int
    """Number of places where it stands."""
    places: list[ExplainedNeighbour]
    """Some of these places, and what followed there."""


@dataclass(frozen=True)
class ExplainedPosition:
    """What the memory does at one token of a text."""

    position: int
    token: str
    """The actual token."""
    probability: float
    """Probability of the actual token, with the memory."""
    network: float
    """Share of the network in the prediction; the rest is the memory's."""
    likely: list[LikelyToken]
    """The likeliest tokens, with the memory."""
    neighbours: list[ExplainedNeighbour]
    """Neighbours, nearest first."""
    matches: list[ExplainedMatch]
    """Exact matches of the text before the token, longest first."""


def explain_tokens(explorer: Explorer, variant: str, text: str) -> list[dict[str, Any]]:
    """Returns every token of a text with its log-probability, with the memory and without it."""
    passage = explorer.passage(text)
    scores = passage["models"][variant]
    known = {"log_probability": "log_probabilities", "without_memory": "without_memory", "network": "network"}
    columns = {name: scores[key] for name, key in known.items() if key in scores}
    return [dict(zip(("token", *columns), row)) for row in zip(passage["tokens"], *columns.values())]


def explain_position(explorer: Explorer, variant: str, text: str, *, position: int) -> ExplainedPosition:
    """Returns what the memory does at one token of a text."""
    found = explorer.token(text, position)
    kept = ("token", "document", "offset", "before", "after")

    def entry(found: dict[str, Any]) -> ExplainedNeighbour:
        weight = found["weights"].get(variant, 0.0)
        return ExplainedNeighbour(**{name: found[name] for name in kept}, weight=weight, distance=found.get("distance"))

    return ExplainedPosition(
        position=position,
        token=found["shown"],
        probability=found["probability"][variant],
        network=found["network"][variant],
        likely=[LikelyToken(each["shown"], each["probability"]) for each in found["likely"][variant]],
        neighbours=[entry(each) for each in found["neighbours"]],
        matches=[
            ExplainedMatch(each["text"], each["length"], each["count"], [entry(place) for place in each["places"]])
            for each in found["matches"]
        ],
    )
