"""Transformer and transformer-XL: one network, with a short-term memory of any length, none included.

The paper's symbols: h_t^r is the input of layer r at position t; E^r = [SG(h^r)] the memory of that layer; h_t^R, the
output, is what the vocabulary's table is multiplied with.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from spalm.compute import threads_for
from spalm.lm.dropout import Dropout
from spalm.lm.relative_attention import attend, sinusoids
from spalm.lm.state import LayerState, State
from spalm.lm.vocabulary import AdaptiveVocabulary, Vocabulary
from spalm.settings import Settings, added_since


class NetworkSettings(Settings):
    """Architecture of a transformer."""

    layers: int = Field(gt=0)
    """Number of layers."""
    width: int = Field(gt=0, multiple_of=2)
    """Size of the hidden states and of the token embeddings."""
    heads: int = Field(gt=0)
    """Number of attention heads in a layer."""
    head_width: int = Field(gt=0)
    """Size of a head's queries, keys and values; heads times head_width may differ from width."""
    feed_forward: int = Field(gt=0)
    """Size of the feed-forward layer's hidden layer."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of embeddings, sublayer outputs and the feed-forward hidden layer; attention weights have none."""
    norm: Literal["pre", "post"] = "pre"
    """Place of the layer norms: before each sublayer and once at the end or, as in transformer-XL, after each."""
    cutoffs: list[int] = []
    """First token of each tail of an adaptive softmax, in rising order; empty: a plain softmax."""
    shrink: int = Field(default=1, gt=0)
    """Factor by which the embeddings of each further tail of the adaptive softmax are narrower."""
    activation: Literal["relu", "squared-relu"] = added_since("relu")
    """Activation of the feed-forward hidden layer; transformer-XL has relu."""
    normalised_keys: bool = added_since(default=False)
    """Whether each head's queries and keys are scaled to a root mean square of one; transformer-XL's are not."""

    @model_validator(mode="after")
    def _rising(self) -> "NetworkSettings":
        """Raises an error unless the cutoffs rise."""
        if any(later <= earlier for earlier, later in zip([0, *self.cutoffs], self.cutoffs)):
            raise ValueError(f"cutoffs {self.cutoffs} must rise from above 0")
        return self


class Attention(nn.Module):
    """Multi-head attention with relative positions: content and position terms, the two learned biases u and v."""

    def __init__(self, settings: NetworkSettings):
        super().__init__()
        self.heads, self.head_width = settings.heads, settings.head_width
        self.normalised = settings.normalised_keys
        inner = settings.heads * settings.head_width
        self.queries = nn.Linear(settings.width, inner, bias=False)
        self.keys_values = nn.Linear(settings.width, 2 * inner, bias=False)
        self.distances = nn.Linear(settings.width, inner, bias=False)
        self.output = nn.Linear(inner, settings.width, bias=False)
        self.content_bias = nn.Parameter(torch.empty(settings.heads, settings.head_width))
        self.position_bias = nn.Parameter(torch.empty(settings.heads, settings.head_width))

    def project_distances(self, encodings: Float[Tensor, "span width"]) -> Float[Tensor, "span heads size"]:
        """Returns r: the keys of distances."""
        return self.distances(encodings).unflatten(-1, (self.heads, self.head_width))

    def _normalise(self, vectors: Tensor) -> Tensor:
        """Returns vectors scaled to a root mean square of one, if the settings say so."""
        return F.rms_norm(vectors, (self.head_width,)) if self.normalised else vectors

    def _normalise_keys(self, keys_values: Tensor) -> Tensor:
        """Returns keys and values with the keys normalised."""
        if not self.normalised:
            return keys_values
        keys, values = keys_values.unbind(2)
        return torch.stack([self._normalise(keys), values], dim=2)

    def forward(
        self,
        x: Float[Tensor, "batch time width"],
        memory: Float[Tensor, "batch memory width"] | None,
        encodings: Float[Tensor, "span width"] | None,
        *,
        state: LayerState | None,
    ) -> Float[Tensor, "batch time width"]:
        keys_values = self.keys_values(x)
        if memory is not None and memory.shape[1]:
            # Two products instead of one of the joined states: then no gradient is computed for the memory.
            keys_values = torch.cat([self.keys_values(memory), keys_values], dim=1)
        keys_values = self._normalise_keys(keys_values.unflatten(-1, (2, self.heads, self.head_width)))
        if state is not None:
            keys_values, distances = state.append(keys_values)
        else:
            assert encodings is not None
            distances = self.project_distances(encodings)
        scale = self.head_width**-0.5
        queries = self._normalise(self.queries(x).unflatten(-1, (self.heads, self.head_width))) * scale
        content, position = queries + self.content_bias * scale, queries + self.position_bias * scale
        return self.output(attend(content, position, keys_values, distances=distances).flatten(2))


class Layer(nn.Module):
    """Attention and feed-forward, each with its layer norm, dropout and residual connection."""

    def __init__(self, settings: NetworkSettings):
        super().__init__()
        self.before = settings.norm == "pre"
        self.squared = settings.activation == "squared-relu"
        self.attention = Attention(settings)
        self.attention_norm = nn.LayerNorm(settings.width)
        self.widen = nn.Linear(settings.width, settings.feed_forward)
        self.narrow = nn.Linear(settings.feed_forward, settings.width)
        self.feed_forward_norm = nn.LayerNorm(settings.width)
        self.dropout = Dropout(settings.dropout)

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.widen(x))
        return self.dropout(self.narrow(self.dropout(hidden.square() if self.squared else hidden)))

    def forward(
        self, x: Tensor, memory: Tensor | None, encodings: Tensor | None, *, state: LayerState | None
    ) -> Tensor:
        if not self.before:
            x = self.attention_norm(x + self.dropout(self.attention(x, memory, encodings, state=state)))
            return self.feed_forward_norm(x + self._feed_forward(x))
        if memory is not None:
            # The memory is a constant: no gradient flows into it, nor through it into the norm.
            with torch.no_grad():
                memory = self.attention_norm(memory)
        x = x + self.dropout(self.attention(self.attention_norm(x), memory, encodings, state=state))
        return x + self._feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A causal language model with the interface `spalm.lm.interface.LanguageModel`."""

    context_length: int | None = None

    def __init__(self, settings: NetworkSettings, vocabulary: int):
        super().__init__()
        self.settings = settings
        self.width = settings.width
        cutoffs = [cutoff for cutoff in settings.cutoffs if cutoff < vocabulary]
        self.vocabulary: Vocabulary | AdaptiveVocabulary = (
            AdaptiveVocabulary(vocabulary, settings.width, cutoffs, shrink=settings.shrink)
            if cutoffs
            else Vocabulary(vocabulary, settings.width)
        )
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.final_norm = nn.LayerNorm(settings.width) if settings.norm == "pre" else nn.Identity()
        self.dropout = Dropout(settings.dropout)
        self._weights = sum(weights.numel() for weights in self.layers.parameters())

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._layers[0].attention.content_bias.device

    @property
    def _layers(self) -> Sequence[Layer]:
        """The layers, with the type that nn.ModuleList does not keep."""
        return cast(Sequence[Layer], self.layers)

    def initialise(self, seed: int) -> "Transformer":
        """Draws the parameters at random, the same for the same seed, and returns the network."""
        torch.manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Attention):
                nn.init.zeros_(module.content_bias)
                nn.init.zeros_(module.position_bias)
        with torch.no_grad():
            for layer in self._layers:  # the sum of 2R sublayers' outputs starts with the variance of one
                for last in (layer.attention.output, layer.narrow):
                    last.weight.mul_((2 * len(self.layers)) ** -0.5)
        self.vocabulary.initialise()
        return self

    def forward(
        self,
        tokens: Int[Tensor, "batch time"],
        memory: list[Tensor] | None = None,
        state: State | None = None,
    ) -> tuple[Float[Tensor, "batch time width"], list[Float[Tensor, "batch time width"]]]:
        """Returns the hidden states h^R of a segment, and every layer's inputs, of which the next memory is made.

        The past is given as `memory`, the layer inputs of earlier tokens (in training), as `state` (at test time), or
        not at all.
        """
        x = self.dropout(self.vocabulary.embed(tokens) * self.width**0.5)
        past = memory[0].shape[1] if memory else 0
        encodings = sinusoids(past + tokens.shape[1], self.width, x) if state is None else None
        layer_inputs = []
        for index, layer in enumerate(self.layers):
            layer_inputs.append(x)
            x = layer(x, memory[index] if memory else None, encodings, state=state[index] if state else None)
        return self.dropout(self.final_norm(x)), layer_inputs

    def empty_state(self, memory_length: int, longest_segment: int) -> State:
        """Returns an empty short-term memory for test time, for segments of up to `longest_segment` tokens."""
        like = self._layers[0].attention.content_bias
        encodings = sinusoids(memory_length + longest_segment, self.width, like)
        with torch.no_grad():
            distances = [layer.attention.project_distances(encodings) for layer in self._layers]
        return [LayerState(each, memory_length) for each in distances]

    def hidden(self, tokens: Int[Tensor, "batch time"], state: State | None) -> Float[Tensor, "batch time width"]:
        """Returns h^R for every token; a state is taken into account and updated in place."""
        with threads_for(2 * tokens.numel() * self._weights):
            return self(tokens, state=state)[0]

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """Returns the tokens' vectors."""
        return self.vocabulary.embed(tokens)

    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary."""
        return self.vocabulary.log_probabilities(hidden)

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Returns log p of each row's target."""
        return self.vocabulary.target_log_probabilities(hidden, targets)
