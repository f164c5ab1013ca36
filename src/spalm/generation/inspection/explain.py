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
    """An entry of the memory that was near, and where it comes from."""

    token: str
    """The token that followed the entry."""
    distance: float
    """Squared distance of the entry's key."""
    document: str
    offset: int
    """Position in the document, in tokens."""
    before: str
    """Text before the entry."""
    after: str
    """Text after the token."""
    weight: float
    """Weight of the entry among the neighbours."""


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


def explain_tokens(explorer: Explorer, variant: str, text: str) -> list[dict[str, Any]]:
    """Returns every token of a text with its log-probability, with the memory and without it."""
    passage = explorer.passage(text)
    scores = passage["models"][variant]
    known = {"log_probability": "log_probabilities", "without_memory": "without_memory", "network": "network"}
    columns = {name: scores[key] for name, key in known.items() if key in scores}
    return [dict(zip(("token", *columns), row)) for row in zip(passage["tokens"], *columns.values())]


def explain_position(explorer: Explorer, variant: str, text: str, position: int) -> ExplainedPosition:
    """Returns what the memory does at one token of a text."""
    found = explorer.token(text, position)
    kept = ("token", "distance", "document", "offset", "before", "after")
    return ExplainedPosition(
        position=position,
        token=found["shown"],
        probability=found["probability"][variant],
        network=found["network"][variant],
        likely=[LikelyToken(each["shown"], each["probability"]) for each in found["likely"][variant]],
        neighbours=[
            ExplainedNeighbour(**{name: each[name] for name in kept}, weight=each["weights"].get(variant, 0.0))
            for each in found["neighbours"]
        ],
    )
