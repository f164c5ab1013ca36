"""A model with a memory as a model of transformers: `generate`, `pipeline` and whatever else takes one work unchanged.

    import spalm.serving.hugging_face                                      # makes it known to the Auto classes
    model = AutoModelForCausalLM.from_pretrained("runs/attached")
    model = AutoModelForCausalLM.from_pretrained("runs/wikitext2", model="spalm")    # one of a run's models

Its logits are log-probabilities of the mixture, normalised over the vocabulary. Every position is searched: the policy
of searching is of the server, which reads one text from left to right.

A pretrained base reads batches as it always does, with its own cache. A run's model reads each text of a batch by
itself, after x_0 and without its padding, in the segments or windows that it was evaluated in; its cache is what reads
them.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from spalm.compute import Hardware
from spalm.generation.export import CONFIG, copy_model, look_like_a_model
from spalm.generation.model import EncodedTokens, Follower, Live, open_live
from spalm.lm.pretrained import Pretrained
from spalm.runs import RESULTS, FinishedRun
from spalm.semiparametric import Retrieved

_ROWS = 256
"""Positions whose neighbours are held at a time."""
_OF_THE_BASE = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers")
"""What programs that take any model look up in its configuration."""


class SpalmConfig(PreTrainedConfig):
    model_type = "spalm"

    base: dict[str, Any] | None = None
    """Of an attached folder: the base model's own configuration."""
    model: str | None = None
    """Of a run: which of its models."""

    def __post_init__(self, **more: Any):
        super().__post_init__(**more)
        if self.base:
            known = self.get_text_config()
            for name in _OF_THE_BASE:
                setattr(self, name, getattr(known, name, None))

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> PreTrainedConfig:
        """The base model's: caches are made to its measure."""
        if not self.base:
            return super().get_text_config(decoder, encoder)
        return AutoConfig.for_model(**self.base).get_text_config(decoder, encoder)


class Followers:
    """What a batch has read so far, text by text, in the place of keys and values."""

    def __init__(self, live: Live, texts: int, symbol: int):
        """`symbol`: the id by which x_0 may be given."""
        self._tokeniser, self._symbol = live.tokeniser, symbol
        self._texts = [live.follow() for _ in range(texts)]
        self._length = 0

    def feed(self, texts: list[list[int]], length: int) -> list[EncodedTokens]:
        """Further tokens of each text; `length` counts their padding too, as `generate` does."""
        self._length += length
        return [self._read(follower, tokens) for follower, tokens in zip(self._texts, texts, strict=True)]

    def _read(self, follower: Follower, tokens: list[int]) -> EncodedTokens:
        start, size = self._tokeniser.start, self._tokeniser.size
        left_out = [start] if not len(follower) and tokens and tokens[0] != self._symbol else []
        heard = follower.feed([*left_out, *(token if token < size else start for token in tokens)])
        return heard[len(left_out) :]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self._length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Goes on with some of the texts, in another order or several times."""
        self._texts = [self._texts[index].copied() for index in beam_idx.tolist()]

    batch_select_indices = reorder_cache


class SpalmForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SpalmConfig
    main_input_name = "input_ids"

    def __init__(self, config: SpalmConfig, live: Live, directory: Path):
        super().__init__(config)
        self.live, self.directory = live, directory
        self.pretrained = isinstance(live.model, Pretrained)
        self.base: torch.nn.Module = live.model.model if self.pretrained else live.model
        self.use_memory = True
        """Switched off, it is the network alone."""
        if self.pretrained:
            self.generation_config = self.base.generation_config
            self._taken = inspect.signature(self.base.base_model.forward).parameters

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *_: Any,
        config: SpalmConfig | None = None,
        model: str | None = None,
        device: str | None = None,
        device_map: str | dict[str, Any] | None = None,
        **more: Any,
    ) -> "SpalmForCausalLM":
        """From what `spalm attach` made, or a finished run and one of its models: `spalm-adaptive` if none is named."""
        del more  # how weights are fetched and stored: here they are as they are
        directory = Path(path)
        if (directory / RESULTS).is_file() and not (directory / CONFIG).is_file():
            look_like_a_model(FinishedRun(directory))  # a run of before there were such files
        config = config or SpalmConfig.from_pretrained(directory)
        config.model = model or config.model
        whole = next(iter(device_map.values())) if isinstance(device_map, dict) else device_map
        live = open_live(directory, Hardware(str(device or whole or "auto")), config.model)
        return cls(config, live, directory).eval()

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:
        """A copy of everything, the base model included: it opens wherever it is put."""
        copy_model(self.directory, Path(folder), {} if self.pretrained else {"model": self.config.model})

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """They are tied already, where they are."""

    def _supports_default_dynamic_cache(self) -> bool:
        return self.pretrained

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        if labels is not None:
            logits_to_keep = 0  # the loss is of all
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        there = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        there = there.bool()
        if self.pretrained:
            about = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
            about = {name: value for name, value in about.items() if name in self._taken and value is not None}
            read = self.base.base_model(input_ids=input_ids, past_key_values=past_key_values, **about)
            there, hidden, cache = there[:, kept], read.last_hidden_state[:, kept], read.past_key_values
            heard = EncodedTokens(hidden[there], self.live.memory.keys_of(hidden[there]))
        else:
            cache = past_key_values or Followers(self.live, len(input_ids), self.config.bos_token_id)
            heard, there = self._follow(input_ids, there, kept, cache)
        logits = torch.zeros(*there.shape, self.config.vocab_size, device=self.live.device)
        places = there.nonzero()
        for start in range(0, len(places), _ROWS):
            part = slice(start, start + _ROWS)
            logits[places[part].unbind(-1)] = self._log_probabilities(heard[part])
        loss = None
        if labels is not None:
            loss = F.nll_loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=None if use_cache is False else cache)

    def _follow(
        self, ids: Tensor, there: Tensor, kept: slice | Tensor, cache: Followers
    ) -> tuple[EncodedTokens, Tensor]:
        """After those tokens that are kept and are there."""
        heard = cache.feed([row[here].tolist() for row, here in zip(ids, there)], ids.shape[1])
        number = (there.cumsum(1) - 1)[:, kept]  # of a token among those of its text
        there = there[:, kept]
        wanted = [(each, row[here].tolist()) for each, row, here in zip(heard, number, there)]
        hidden = torch.cat([each.hidden[numbers] for each, numbers in wanted])
        return EncodedTokens(hidden, np.concatenate([each.keys[numbers] for each, numbers in wanted])), there

    def _log_probabilities(self, heard: EncodedTokens) -> Tensor:
        """Of the vocabulary; what is in the configuration's beyond it is a symbol that no text has."""
        live = self.live
        retrieved = live.search(heard.keys) if self.use_memory else Retrieved.empty(len(heard.keys))
        combined = live.combiner.combine(live.model, heard.hidden, retrieved.to(live.device))
        missing = self.config.vocab_size - combined.log_probabilities.shape[-1]
        return F.pad(combined.log_probabilities, (0, missing), value=-torch.inf)


AutoConfig.register("spalm", SpalmConfig)
AutoModelForCausalLM.register(SpalmConfig, SpalmForCausalLM)
