"""A model with a memory as a model for transformers: `generate`, `pipeline` and the like work unchanged.

    spalm.register_with_transformers()                                     # registers it with the Auto classes
    model = AutoModelForCausalLM.from_pretrained("runs/attached")
    model = AutoModelForCausalLM.from_pretrained("runs/wikitext2", model="spalm")    # one of a run's models

Its logits are log-probabilities of the mixture, normalised over the vocabulary. Every position is searched: the search
policy is used only by generation and the server, which read one text from left to right.

A pretrained base reads batches as it always does, with its own cache. A run's model reads each text of a batch by
itself, after x_0 and without its padding, in the segments or windows that it was evaluated in; `BatchCache` holds the
decoders that do so.
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from spalm.choices import PrecisionName
from spalm.compute import Hardware
from spalm.generation.decoding.decoder import Decoder, EncodedTokens
from spalm.generation.hugging_face.export import CONFIG, copy_model, export_for_transformers
from spalm.generation.load import load_model
from spalm.generation.model import Model
from spalm.generation.models import AttachedModels
from spalm.lm.pretrained import LlamaModel, PretrainedModel
from spalm.memory.exact import BORDER, last_contexts
from spalm.runs import RESULTS, FinishedRun
from spalm.semiparametric import Retrieved

_ROWS = 256
"""Positions whose neighbours are held at a time."""
_BASE_FIELDS = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers")
"""Fields of the base's configuration that programs for arbitrary models look up."""
_TEXT = "spalm_text_ids"
"""Attribute of a cache that holds the tokens read into it."""
_PASSED_ON = ("attention_mask", "position_ids", "use_cache")
"""Arguments of `forward` that are passed on to a pretrained base."""


class SpalmConfig(PreTrainedConfig):
    """Configuration of a model with a memory."""

    model_type = "spalm"

    base: dict[str, Any] | None = None
    """Configuration of the base model, where the memory is attached to one."""
    model: str | None = None
    """Name of the model in the folder of a run; None for an attached model."""

    def __post_init__(self, **more: Any):
        super().__post_init__(**more)
        if self.base:
            base = self.get_text_config()
            for name in _BASE_FIELDS:
                setattr(self, name, getattr(base, name, None))

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> PreTrainedConfig:
        """Returns the base model's configuration, from which transformers takes the size of caches."""
        if not self.base:
            return super().get_text_config(decoder, encoder)
        return AutoConfig.for_model(**self.base).get_text_config(decoder, encoder)


class BatchCache:
    """The state of a batch of texts read so far, one decoder for each text, instead of cached keys and values."""

    def __init__(self, model: Model, texts: int, symbol: int):
        """`symbol` is the id by which x_0 may be given."""
        self._tokeniser, self._symbol = model.tokeniser, symbol
        self._texts = [model.decoder() for _ in range(texts)]
        self._length = 0

    def feed(self, texts: list[list[int]], length: int) -> list[EncodedTokens]:
        """Reads further tokens of each text; `length` is their number with padding, as `generate` counts."""
        self._length += length
        return [self._read(decoder, tokens) for decoder, tokens in zip(self._texts, texts, strict=True)]

    def _read(self, decoder: Decoder, tokens: list[int]) -> EncodedTokens:
        """Reads further tokens of one text; a text that does not begin with x_0 is read after it."""
        start, size = self._tokeniser.start, self._tokeniser.size
        left_out = [start] if not len(decoder) and tokens and tokens[0] != self._symbol else []
        encoded = decoder.feed([*left_out, *(token if token < size else start for token in tokens)])
        return encoded[len(left_out) :]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Returns the number of tokens read so far, padding included."""
        return self._length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the texts with these indices, in this order; a text may be kept several times."""
        self._texts = [self._texts[index].copied() for index in beam_idx.tolist()]

    batch_select_indices = reorder_cache


class SpalmForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal LM for transformers that predicts as a model with a memory does."""

    config_class = SpalmConfig
    main_input_name = "input_ids"

    def __init__(self, config: SpalmConfig, model: Model):
        super().__init__(config)
        self.memory_model, self.directory = model, model.models.directory
        self.pretrained = isinstance(model.network, PretrainedModel)
        self.base: Any = model.network.model if isinstance(model.network, PretrainedModel) else model.network
        self.use_memory = True
        """Whether the memory is used; without it, this is the network alone."""
        if self.pretrained:
            self.generation_config = self.base.generation_config
            self._taken = inspect.signature(self.base.base_model.forward).parameters

    @classmethod
    def of_model(cls, model: Model) -> "SpalmForCausalLM":
        """Wraps a model with a memory that is already open."""
        if isinstance(model.network, LlamaModel):
            model = _by_torch(model)
        config = _config(model.models.directory)
        if not config.base:
            config.model = model.variant.name
        return cls(config, model).eval()

    @classmethod
    def from_pretrained(cls, path: str | Path, *_: Any, **options: Any) -> "SpalmForCausalLM":  # pyright: ignore
        """Opens what `spalm attach` made, or a finished run.

        `model` names one of a run's models, `device` is where it computes, `dtype` float32 or bfloat16. Others,
        which are about fetching and storing weights, are ignored.
        """
        config = options.get("config") or _config(Path(path))
        config.model = options.get("model") or config.model
        device_map = options.get("device_map")
        whole = next(iter(device_map.values())) if isinstance(device_map, dict) else device_map
        wanted = str(options.get("dtype")).removeprefix("torch.")
        precision: PrecisionName = "float32" if wanted == "float32" else "bfloat16" if wanted == "bfloat16" else "auto"
        hardware = Hardware(str(options.get("device") or whole or "auto"), backend="torch", precision=precision)
        return cls(config, load_model(path, hardware, config.model)).eval()

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:  # pyright: ignore
        """Copies everything, including the base model, to a folder that can then be moved anywhere."""
        copy_model(self.directory, Path(folder), {} if self.pretrained else {"model": self.config.model})

    def tie_weights(self, *_: Any, **__: Any) -> None:  # pyright: ignore
        """Does nothing: the loaded network has tied its weights already."""

    def _supports_default_dynamic_cache(self) -> bool:
        return self.pretrained

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Returns log-probabilities as logits, and with labels the mean loss."""
        if labels is not None:
            logits_to_keep = 0  # the loss needs all positions
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        mask = mask.bool()  # of the tokens that are no padding
        if self.pretrained:
            options = {"attention_mask": attention_mask, "position_ids": position_ids, **options}
            given = {name: options.get(name) for name in _PASSED_ON if name in self._taken}
            given = {name: value for name, value in given.items() if value is not None}
            read = self.base.base_model(input_ids=input_ids, past_key_values=past_key_values, **given)
            mask, hidden, cache = mask[:, kept], read.last_hidden_state[:, kept].float(), read.past_key_values
            contexts = self._contexts(input_ids, attention_mask, cache, text_ids=options.get("text_ids"))
            contexts = contexts[:, kept][mask.cpu().numpy()]
            encoded = EncodedTokens(hidden[mask], self.memory_model.store.keys_of(hidden[mask]), contexts)
        else:
            cache = past_key_values or BatchCache(self.memory_model, len(input_ids), self.config.bos_token_id)
            encoded, mask = self._read_on(input_ids, mask, kept, cache=cache)
        logits = torch.zeros(*mask.shape, self.config.vocab_size, device=self.memory_model.device)
        places = mask.nonzero()
        for start in range(0, len(places), _ROWS):
            part = slice(start, start + _ROWS)
            logits[places[part].unbind(-1)] = self._log_probabilities(encoded[part])
        loss = None
        if labels is not None:
            loss = F.nll_loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device))
        cache = None if options.get("use_cache") is False else cache
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # pyright: ignore

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore
        """Returns the arguments of `forward`, among them all tokens so far, of which exact matches need the last.

        The name `kwargs` tells transformers that arguments of `forward` are passed on.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)  # pyright: ignore
        return {**inputs, "text_ids": input_ids}

    def _contexts(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: Any, *, text_ids: Tensor | None
    ) -> np.ndarray:
        """Returns the queries for exact matches of a batch's positions.

        The tokens before those that are read now are `text_ids` or, if a program calls `forward` itself, those that
        were read into the same cache before.
        """
        if text_ids is None:
            before = getattr(cache, _TEXT, input_ids[:, :0])
            text_ids = torch.cat([before, input_ids], 1)
            if cache is not None:
                if cache.get_seq_length() != text_ids.shape[1] and self.memory_model.combiner.uses_matches:
                    raise ValueError("the cache was filled elsewhere; give `text_ids`, all tokens up to the last")
                setattr(cache, _TEXT, text_ids)
        numbers = (text_ids + 1).cpu().numpy()
        if attention_mask is not None and attention_mask.shape == text_ids.shape:
            numbers = np.where(attention_mask.cpu().numpy() != 0, numbers, BORDER)
        return np.stack([last_contexts(row, input_ids.shape[1]) for row in numbers])

    def _read_on(
        self, ids: Tensor, mask: Tensor, kept: slice | Tensor, *, cache: BatchCache
    ) -> tuple[EncodedTokens, Tensor]:
        """Reads further tokens of a batch.

        Returns hidden states and keys of the kept tokens without padding, and the mask of these among the kept ones.
        """
        encoded = cache.feed([row[here].tolist() for row, here in zip(ids, mask)], ids.shape[1])
        number = (mask.cumsum(1) - 1)[:, kept]  # index of a token among those of its text
        mask = mask[:, kept]
        wanted = [(each, row[here].tolist()) for each, row, here in zip(encoded, number, mask)]
        return EncodedTokens.concatenate([each[numbers] for each, numbers in wanted]), mask

    def _log_probabilities(self, encoded: EncodedTokens) -> Tensor:
        """Returns log p of the vocabulary. A symbol that the configuration adds to it never occurs: its p is 0."""
        model = self.memory_model
        retrieved = Retrieved.empty(len(encoded))
        memories = model.models.memories.select()
        if self.use_memory and model.combiner.uses_neighbours:
            retrieved = memories.nearest(encoded.keys)
        if self.use_memory and model.combiner.uses_matches:
            retrieved = memories.add_matches(retrieved, encoded.contexts)
        combined = model.combiner.combine(model.network, encoded.hidden, retrieved.to(model.device))
        missing = self.config.vocab_size - combined.log_probabilities.shape[-1]
        return F.pad(combined.log_probabilities, (0, missing), value=-torch.inf)


def _by_torch(model: Model) -> Model:
    """Returns a model that llama.cpp runs, opened again for torch, which transformers needs."""
    assert isinstance(model.models, AttachedModels)
    return load_model(model.models.directory, replace(model.models.attached.base.hardware, backend="torch"))


def _config(directory: Path) -> SpalmConfig:
    if (directory / RESULTS).is_file() and not (directory / CONFIG).is_file():
        export_for_transformers(FinishedRun(directory))  # the run is older than these files
    return SpalmConfig.from_pretrained(directory)


def register_with_transformers() -> None:
    """Registers models with a memory with AutoConfig and AutoModelForCausalLM. Calling it again changes nothing."""
    AutoConfig.register("spalm", SpalmConfig, exist_ok=True)
    AutoModelForCausalLM.register(SpalmConfig, SpalmForCausalLM, exist_ok=True)
