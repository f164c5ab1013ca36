"""Scores of a text: the log-probability of each token, with the memory and without it."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.corpus import Tokeniser, TokenStream
from spalm.errors import InputError
from spalm.generation.models import Network, Variant
from spalm.lm import hidden_states
from spalm.semiparametric import Retrieved

_ROWS = 256
"""Positions whose distributions over the vocabulary are held at a time."""


@dataclass(frozen=True)
class TokenScore:
    """A token of a text and how likely it was."""

    text: str
    log_probability: float
    """Log-probability of the token, with the memory."""
    without_memory: float
    """Log-probability of the token under the network alone."""


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text."""

    tokens: list[TokenScore]
    perplexity: float
    """Perplexity per token, with the memory."""
    perplexity_without_memory: float
    """Perplexity per token of the network alone."""


@dataclass(frozen=True)
class VariantScores:
    """A variant's scores of the actual tokens, position by position."""

    log_probabilities: Float[Tensor, "n"]
    """Log-probabilities, with the memory."""
    network: Float[Tensor, "n"]
    """Share of the network in the prediction; the rest is the memory's."""
    without_memory: Float[Tensor, "n"]
    """Log-probabilities under the network alone."""


def stream_of_text(text: str, name: str, tokeniser: Tokeniser) -> TokenStream:
    """Returns the tokens of a text as a stream of one document."""
    try:
        tokens = tokeniser.encode([text.encode()])[0].astype(np.int64)
    except UnicodeEncodeError as error:
        raise InputError(f"the text is no Unicode (sign {error.start}); give it as UTF-8") from None
    return TokenStream(tokens, np.array([len(tokens)]), lambda: [name], start=tokeniser.start)


@torch.inference_mode()
def read_states(network: Network, stream: TokenStream, first: int, *, last: int) -> Float[Tensor, "n width"]:
    """Returns the hidden states of positions `first` to `last` - 1, read with their whole left context."""
    start = first // network.reading.stride * network.reading.stride
    hidden = torch.zeros(last - first, network.model.width, device=network.model.device)
    for positions, states in hidden_states(network.model, stream, network.reading, wanted=range(start, last)):
        wanted = positions >= first
        hidden[positions[wanted] - first] = states[torch.from_numpy(wanted)].float()
    return hidden


@torch.inference_mode()
def score_variant(
    variant: Variant, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"], *, retrieved: Retrieved
) -> VariantScores:
    """Scores the actual tokens, `targets`, at positions whose hidden states and neighbours are known."""
    model = variant.network.model
    parts = []
    for rows in torch.arange(len(targets)).split(_ROWS):
        combined = variant.combiner.combine(model, hidden[rows], retrieved[rows])
        scores = combined.log_probabilities.gather(-1, targets[rows, None])[:, 0]
        parts.append((scores, combined.network_share, model.target_log_probabilities(hidden[rows], targets[rows])))
    return VariantScores(*(torch.cat(part) for part in zip(*parts)))


def score_of(texts: list[str], scores: VariantScores) -> Score:
    """Returns the score of a text from a variant's scores of its tokens."""

    def perplexity(log_probabilities: Tensor) -> float:
        return math.exp(-float(log_probabilities.double().mean()))

    rows = zip(texts, scores.log_probabilities.tolist(), scores.without_memory.tolist())
    tokens = [TokenScore(*row) for row in rows]
    return Score(tokens, perplexity(scores.log_probabilities), perplexity(scores.without_memory))
