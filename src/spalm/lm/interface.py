"""The interface between a language model and everything that uses one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """What a model computes for the tokens that it reads."""

    hidden: Float[Tensor, "n width"]
    """The hidden state after each token."""
    logits: Float[Tensor, "n vocabulary"] | None = None
    """Logits of the next token, where the model computes them in the same pass."""

    def __getitem__(self, rows: slice) -> "Outputs":
        return Outputs(self.hidden[rows], None if self.logits is None else self.logits[rows])

    @classmethod
    def concatenate(cls, parts: "Sequence[Outputs]") -> "Outputs":
        """Returns several groups of tokens as one."""
        if len(parts) == 1:
            return parts[0]
        logits = [part.logits for part in parts if part.logits is not None]
        together = torch.cat(logits) if len(logits) == len(parts) else None
        return cls(torch.cat([part.hidden for part in parts]), together)


class LanguageModel(Protocol):
    """Computes hidden states of a segment given a carried state, token embeddings, and probabilities from a vector.

    Memory, gate, kNN-LM, generation and evaluation need nothing else, so they work with our transformer-XL and with a
    pretrained model alike. A long-term memory is mixed in between `hidden` and the probabilities: SPALM passes on z_t
    instead of h_t.
    """

    width: int
    """Size of a hidden state."""
    context_length: int | None
    """Number of tokens that the model can read from an empty state; None: any number."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        ...

    def empty_state(self, memory_length: int, longest_segment: int) -> Any:
        """Returns a state without tokens.

        It will remember `memory_length` tokens; no segment that is read with it may exceed `longest_segment` tokens.
        """
        ...

    def hidden(self, tokens: Int[Tensor, "batch time"], state: Any | None) -> Float[Tensor, "batch time width"]:
        """Returns h_t for every token; a state is taken into account and updated in place."""
        ...

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """Returns y: the vectors of tokens in the table that the output layer uses."""
        ...

    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary, normalised, in single precision."""
        ...

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Returns log p of one token for each row, without holding the logits of all rows at once."""
        ...


@runtime_checkable
class BatchReader(Protocol):
    """A model that reads pieces of several texts in one pass. It may return logits with the hidden states."""

    can_shorten: bool
    """Whether the last tokens of a text can be taken back."""

    def read(self, pieces: Sequence[tuple[Any, Sequence[int]]], needed: Sequence[int] | None = None) -> list[Outputs]:
        """Reads further tokens of several texts, each given by its state; updates the states.

        Returns outputs of the last positions of each piece, as many as `needed` says; None: of all.
        """
        ...

    def reserve(self, texts: int) -> None:
        """Makes room for this many texts at a time; none may be in progress."""
        ...

    def shorten(self, state: Any, tokens: int) -> None:
        """Forgets what a text has after its first `tokens` tokens."""
        ...

    def copy_state(self, state: Any) -> Any:
        """Returns an independent state with the same tokens."""
        ...
