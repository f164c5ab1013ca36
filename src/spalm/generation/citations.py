"""Citations: the documents of the memory that generated text comes from.

The memory's share in a token is what it added to its probability: lambda p_kNN(w) / p(w), and the same for exact
matches. The memory decided a token if its share is more than half; such tokens in a row are one citation, and its
sources are the documents of the neighbours and matches that proposed them. A citation goes on with a document that the
answer follows word for word, as long as the memory takes part; whether such tokens were drafted makes no difference.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from spalm.generation.answer import Citation, CitedSource, GeneratedToken
from spalm.generation.memories import MemorySelection
from spalm.memory import MISSING, EntryLookup
from spalm.semiparametric import CombinedPrediction, Retrieved

_DECIDED = 0.5
"""The memory decided a token if its share in the token's probability is above this."""
TOOK_PART = 0.1
"""A token with which a cited document goes on is cited too if the memory's share in it is above this."""
_COMPARED = 40
"""Highest number of proposals of a token whose documents are asked how they go on."""
_SOURCES = 3
"""Highest number of sources named for a token or a citation."""
_Document = tuple[str, str]
"""A memory and a document in it, by their names."""


@dataclass
class FollowedPlace:
    """The place in the memory where an answer goes on word for word, as far as there is one."""

    entry: int = MISSING
    """Entry that proposed the last token, or with which a document goes on by it; MISSING: there is none."""
    length: int = 0
    """Number of tokens of the answer that follow one document, up to the last."""
    agreement: float = 0.0
    """Share of the last token's proposals, by weight, after which the documents go on as after the entry."""
    expected: int = MISSING
    """Token with which the document goes on; MISSING: it ends."""

    def advance(self, entries: EntryLookup, combined: CombinedPrediction, retrieved: Retrieved, *, token: int) -> int:
        """Goes on by a token, and returns its entry in the document that was followed; MISSING if it is not there.

        What most of the token's proposals, by weight, go on with is expected next; a place that is followed is only
        left for another if it goes on otherwise.
        """
        goes_on = self.entry != MISSING and token == self.expected
        self.entry, self.length = (self.entry + 1, self.length + 1) if goes_on else (MISSING, 0)
        followed = self.entry
        ids, weights = strongest_proposals(combined, retrieved, token)
        after = next_tokens(entries, np.append(ids, followed))
        after, self.expected = after[:-1], int(after[-1])
        self.agreement = 0.0
        if (after != MISSING).any():
            choices, which = np.unique(after, return_inverse=True)
            votes = np.where(choices == MISSING, 0, np.bincount(which, weights))
            self.agreement = float(votes.max() / weights.sum())
            winner = int(choices[votes.argmax()])
            if winner != self.expected:
                self.entry, self.length, self.expected = int(ids[(after == winner).argmax()]), 1, winner
        return followed


def strongest_proposals(
    combined: CombinedPrediction, retrieved: Retrieved, token: int
) -> tuple[Int[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Returns the entries that proposed a token most strongly at the first position, and their weights."""
    count = min(combined.neighbour_weights.shape[1], retrieved.ids.shape[1])
    found = [(retrieved.ids[0, :count], retrieved.tokens[0, :count], combined.neighbour_weights[0, :count])]
    if combined.match_weights is not None and retrieved.matched is not None:
        matched = retrieved.matched
        found.append((matched.ids[0].flatten(), matched.tokens[0].flatten(), combined.match_weights[0].flatten()))
    ids, tokens, weights = (np.concatenate([part.cpu().numpy() for part in parts]) for parts in zip(*found))
    own = np.flatnonzero((tokens == token) & (weights > 0))
    own = own[np.argsort(-weights[own], kind="stable")[:_COMPARED]]
    return ids[own], weights[own]


def next_tokens(entries: EntryLookup, ids: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Returns the tokens with which documents go on after entries, MISSING where they end."""
    documents = entries.live_documents
    index = documents.index_of(ids)
    same = (index != MISSING) & (index == documents.index_of(ids + 1))
    return entries.tokens_of(np.where(same, ids + 1, MISSING))


def continuation(entries: EntryLookup, entry: int, length: int) -> list[int]:
    """Returns the tokens that follow the token of an entry in its document, at most `length`."""
    documents = entries.live_documents
    index = int(documents.index_of(np.array(entry)))
    if index == MISSING:
        return []
    end = int(documents.first_ids[index] + documents.entries[index])
    return entries.tokens_of(np.arange(entry + 1, min(entry + 1 + length, end))).tolist()


def memory_share(combined: CombinedPrediction, retrieved: Retrieved, token: int) -> float:
    """Returns the share of a token's probability that came from the memory, at the first position."""
    proposed = combined.weight_of(token, retrieved)
    probability = math.exp(float(combined.log_probabilities[0, token]))
    return min(1.0, (1 - float(combined.network_share[0])) * proposed / probability)


def cited_sources(
    memories: MemorySelection,
    combined: CombinedPrediction,
    retrieved: Retrieved,
    *,
    token: int,
    followed: int = MISSING,
) -> list[CitedSource]:
    """Returns the places in the memories that proposed a token most strongly, at the first position.

    The entry that the answer follows comes first, with weight 0 if it was not retrieved.
    """
    weights = {id: weight for id, proposal, weight in combined.proposals(retrieved) if proposal == token}
    if followed != MISSING:
        weights.setdefault(followed, 0.0)
    found = []
    for id in sorted(weights, key=lambda id: (id != followed, -weights[id]))[:_SOURCES]:
        found_in = memories.source(id)
        if found_in is not None:
            memory, source = found_in
            found.append(CitedSource(source.document, source.offset, weights[id], memory))
    return found


def citations_of(tokens: list[GeneratedToken]) -> list[Citation]:
    """Returns the parts of an answer that the memory decided, with the documents that proposed them most strongly.

    A document that the part follows word for word comes before others.
    """
    found: list[Citation] = []
    part: list[GeneratedToken] = []
    start = end = 0
    for token in tokens:
        goes_on = bool(part) and token.continues and token.memory_share > TOOK_PART
        if token.memory_share > _DECIDED or goes_on:
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
    weights: dict[_Document, float] = defaultdict(float)
    offsets: dict[_Document, int] = {}
    followed: dict[_Document, int] = defaultdict(int)
    for token in part:
        if token.continues and token.sources:
            followed[_document_of(token.sources[0])] += 1
    for source in (source for token in part for source in token.sources):
        weights[_document_of(source)] += source.weight
        offsets.setdefault(_document_of(source), source.offset)  # where the part begins there
    best = sorted(weights, key=lambda document: (-followed[document], -weights[document]))[:_SOURCES]
    return [Citation(start, end, [CitedSource(each[1], offsets[each], weights[each], each[0]) for each in best])]


def _document_of(source: CitedSource) -> _Document:
    return source.memory, source.document


def citation_lines(text: str, citations: list[Citation], *, name_memories: bool = False) -> list[str]:
    """Returns the citations of an answer as lines for people; `name_memories`: there is more than one."""
    lines = []
    for citation in citations:
        cited = text[citation.start : citation.end].strip()
        sources = "; ".join(
            f"{f'{each.memory}: ' if name_memories else ''}{each.document}, token {each.offset:,}"
            for each in citation.sources
        )
        lines += [f"{cited!r} from {sources}"] if cited else []
    return lines or ["the memory decided nothing of this"]
