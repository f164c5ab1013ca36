"""The one interface between a language model and the rest of the house."""

from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor


class LanguageModel(Protocol):
    """Hidden states for a segment given a carried state, the embedding lookup, and probabilities from a vector.

    Memory, gate, kNN-LM, generation and evaluation need nothing else, so our transformer-XL and a pretrained model
    are the same thing to them. Between `hidden` and the probabilities is where a long-term memory comes in: SPALM gives
    z_t instead of h_t on.
    """

    width: int
    """Size of a hidden state."""

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        ...

    def start(self, memory_length: int, longest_segment: int) -> Any:
        """An empty state that will remember `memory_length` tokens, to be read in segments of at most that length."""

    def hidden(self, tokens: Int[Tensor, "batch time"], state: Any | None) -> Float[Tensor, "batch time width"]:
        """h_t for every token; the state, if there is one, is taken into account and brought up to date in place."""

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """y: the vectors of tokens in the table that the output layer uses."""

    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """log p of every token of the vocabulary, normalised, in single precision."""

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """log p of one token a row, without holding the logits of all rows at once."""
