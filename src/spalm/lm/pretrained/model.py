"""Pretrained causal language models of Hugging Face, frozen, with the same interface as our own.

A memory is mixed in between h_t, the last hidden state, and the probabilities, so the way from one to the other must be
known exactly. It is the output layer, for some architectures followed by a scale or a soft cap that their configuration
names. Every model is checked when it is opened: its logits must follow from h_t in this way, and it must read from left
to right, with the same result at once and in pieces. A model that fails is refused.
"""

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from spalm.errors import InputError

_ROWS = 256
"""Positions whose logits are in memory at a time."""
PROBE = 7
"""Number of tokens on which a model is checked."""


@dataclass
class CacheState:
    """Keys and values of the tokens read so far."""

    cache: Any
    """The cache of transformers."""


class PretrainedModel:
    """A loaded model. Unlike the state of our own networks, its state grows with the text, up to `context_length`."""

    def __init__(self, model: Any, name: str):
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.config = model.config.get_text_config()
        self.context_length: int | None = getattr(self.config, "max_position_embeddings", None)
        """Number of tokens that the model can read; None: any number."""
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise InputError(f"{name} ({type(model).__name__}) has no output layer; give a causal language model")
        self.vocabulary, self.width = self._head.weight.shape
        self.can_shorten = self._keeps_all_tokens()
        """Whether the last tokens of a text can be taken back."""
        self._refuse_unless_exact(name)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._head.weight.device

    def to_bfloat16(self) -> Self:
        """Rounds the weights of everything below the output layer to bfloat16; returns the model itself.

        The output layer stays as it is: logits and all that the memory does to them is in single precision.
        """
        parameters = list(self.model.base_model.parameters())
        if any(parameter is self._head.weight for parameter in parameters):  # embeddings are the same table
            self._head = copy.deepcopy(self._head)
        for parameter in parameters:
            parameter.data = parameter.data.to(torch.bfloat16)
        return self

    def empty_state(self, memory_length: int = 0, longest_segment: int = 0) -> CacheState:  # noqa: ARG002
        """Returns an empty cache; it grows as needed, whatever the lengths given."""
        from transformers.cache_utils import DynamicCache

        return CacheState(DynamicCache(config=self.config))

    @torch.inference_mode()
    def hidden(
        self, tokens: Int[Tensor, "batch time"], state: CacheState | None = None
    ) -> Float[Tensor, "batch time width"]:
        """Returns h_t for every token; a state is taken into account and updated in place."""
        cache = None if state is None else state.cache
        read = self.model.base_model(input_ids=tokens, past_key_values=cache, use_cache=cache is not None)
        if state is not None:
            state.cache = getattr(read, "past_key_values", None)
        return read.last_hidden_state.float()

    def _keeps_all_tokens(self) -> bool:
        """Returns whether every layer keeps the keys and values of all tokens, not of a window, and nothing else."""
        from transformers.cache_utils import DynamicLayer

        layers = self.empty_state().cache.layers
        return all(type(layer) is DynamicLayer or self._has_wide_window(layer) for layer in layers)

    def _has_wide_window(self, layer: Any) -> bool:
        """Returns whether a layer of the cache has a window that no text can fill."""
        from transformers.cache_utils import DynamicSlidingWindowLayer

        longest = self.context_length
        return type(layer) is DynamicSlidingWindowLayer and longest is not None and layer.sliding_window > longest

    def shorten(self, state: CacheState, tokens: int) -> None:
        """Forgets what a text has after its first `tokens` tokens."""
        if dropped := state.cache.get_seq_length() - tokens:
            state.cache.crop(-dropped)

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """Returns the tokens' vectors in the table of the output layer."""
        return F.embedding(tokens, self._head.weight).float()

    def logits(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """Returns the logits that the model itself computes, in single precision."""
        logits = self._head(hidden.to(self._head.weight.dtype)).float()
        logits = logits * (getattr(self.config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(self.config, "logits_scaling", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary."""
        return torch.log_softmax(self.logits(hidden), dim=-1)

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Returns log p of one token for each row."""
        parts = zip(hidden.split(_ROWS), targets.split(_ROWS))
        return torch.cat([-F.cross_entropy(self.logits(rows), wanted, reduction="none") for rows, wanted in parts])

    @torch.inference_mode()
    def _refuse_unless_exact(self, name: str) -> None:
        """Raises an error unless the model does what the module's docstring assumes."""
        tokens = torch.arange(1, 1 + PROBE, device=self.device)[None] % self.vocabulary
        half = PROBE // 2
        hidden = self.hidden(tokens)
        if not nearly_equal(self.hidden(tokens[:, :half]), hidden[:, :half]):
            raise InputError(
                f"{name} ({type(self.model).__name__}) looks ahead: what it says of a token depends on those after it; "
                "give a causal language model"
            )
        if not nearly_equal(self.model(input_ids=tokens).logits.float(), self.logits(hidden)):
            raise InputError(
                f"{name}: the logits of {type(self.model).__name__} do not follow from its last hidden state in a way "
                "that is known here, so a memory cannot be mixed in exactly; give another model"
            )
        state = self.empty_state()
        pieces = [self.hidden(part, state) for part in (tokens[:, :half], tokens[:, half:])]
        if not nearly_equal(torch.cat(pieces, 1), hidden):
            raise InputError(
                f"{name}: {type(self.model).__name__} does not go on from keys and values of what it has read; give a "
                "model with attention"
            )


def nearly_equal(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    tolerance = 1e-3 * float(expected.std()) + 1e-6
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=tolerance)
