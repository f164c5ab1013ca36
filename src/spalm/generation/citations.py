"""Citations: the documents of the memory that generated text comes from.

The memory's share in a token is what it added to its probability: lambda p_kNN(w) / p(w), and the same for exact
matches. The memory decided a token if its share is more than half; such tokens in a row are one citation, and its
sources are the documents of the neighbours and matches that proposed them.
"""

import math
from collections import defaultdict

from spalm.generation.answer import Citation, CitedSource, GeneratedToken
from spalm.memory import Entries
from spalm.semiparametric import CombinedPrediction, Retrieved

_DECIDED = 0.5
"""The memory decided a token if its share in the token's probability is above this."""
_SOURCES = 3
"""Highest number of sources named for a token or a citation."""


def memory_share(combined: CombinedPrediction, retrieved: Retrieved, token: int) -> float:
    """Returns the share of a token's probability that came from the memory, at the first position."""
    proposed = combined.weight_of(token, retrieved)
    probability = math.exp(float(combined.log_probabilities[0, token]))
    return min(1.0, (1 - float(combined.network_share[0])) * proposed / probability)


def cited_sources(
    entries: Entries, combined: CombinedPrediction, retrieved: Retrieved, token: int
) -> list[CitedSource]:
    """Returns the places in the memory that proposed a token most strongly, at the first position."""
    proposals = [(id, weight) for id, proposal, weight in combined.proposals(retrieved) if proposal == token]
    found = []
    for id, weight in sorted(proposals, key=lambda proposal: -proposal[1])[:_SOURCES]:
        source = entries.source(id)
        if source is not None:
            found.append(CitedSource(source.document, source.offset, weight))
    return found


def citations_of(tokens: list[GeneratedToken]) -> list[Citation]:
    """Returns the parts of an answer that the memory decided, with the documents that proposed them most strongly."""
    found: list[Citation] = []
    part: list[GeneratedToken] = []
    start = end = 0
    for token in tokens:
        if token.memory_share > _DECIDED:
            start = start if part else end
            part.append(token)
        else:
            found += _citation(part, start, end)
            part = []
        end += len(token.text)
    return [*found, *_citation(part, start, end)]


def _citation(part: list[GeneratedToken], start: int, end: int) -> list[Citation]:
    """Returns the citation of tokens in a row; none if they show no text."""
    if not part or end <= start:
        return []
    weights: dict[str, float] = defaultdict(float)
    offsets: dict[str, int] = {}
    for source in (source for token in part for source in token.sources):
        weights[source.document] += source.weight
        offsets.setdefault(source.document, source.offset)  # where the part begins there
    best = sorted(weights, key=lambda document: -weights[document])[:_SOURCES]
    return [Citation(start, end, [CitedSource(document, offsets[document], weights[document]) for document in best])]


def citation_lines(text: str, citations: list[Citation]) -> list[str]:
    """Returns the citations of an answer as lines for people."""
    lines = []
    for citation in citations:
        cited = text[citation.start : citation.end].strip()
        sources = "; ".join(f"{each.document}, token {each.offset:,}" for each in citation.sources)
        lines += [f"{cited!r} from {sources}"] if cited else []
    return lines or ["the memory decided nothing of this"]
