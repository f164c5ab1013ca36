"""Hidden states of a pretrained model at several places, for every position of the texts of a domain."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from footballers import FOOTBALLER, articles
from spalm.console import bar
from spalm.corpus import TokenStream
from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.errors import InputError
from spalm.lm.pretrained import PretrainedModel

DOMAINS = {"footballers": FOOTBALLER, "films": re.compile(r"\bfilm\b[^.]{0,80}\bdirected by\b")}
"""Patterns that the beginnings of a domain's articles match."""
FINAL = "last state, after the norm"
BEFORE = "last state, before the norm"
FEED_FORWARD = "input of the last feed-forward"
EARLIER = "state after two thirds of the layers"
PLACES = (FINAL, BEFORE, FEED_FORWARD, EARLIER)
"""Places in the model; the first is what the product takes, and all that llama.cpp gives."""
_LONGEST = 768
"""Number of tokens of a document that are read at most: one window."""


@dataclass(frozen=True)
class DomainStates:
    """The documents of a domain, first those of the memory, then those of dev, and their hidden states."""

    name: str
    text: TokenStream
    memory_documents: int
    """Number of the first documents, which are in the memory."""
    states: dict[str, Tensor]
    """By place, a row for each position, in half precision."""

    @property
    def memory_tokens(self) -> int:
        """Number of positions of the memory."""
        return int(self.text.ends[self.memory_documents - 1])

    @property
    def documents(self) -> Tensor:
        """The document of each position."""
        return torch.from_numpy(np.repeat(np.arange(len(self.text.ends)), self.text.ends - self.text.begins))

    @property
    def targets(self) -> Tensor:
        """The token of each position: what its hidden states predict."""
        return torch.from_numpy(self.text.tokens.astype(np.int64))


class PlacesInModel:
    """Reads documents, and keeps what passes several places of a model with layers in the manner of Llama."""

    def __init__(self, model: PretrainedModel):
        self._model = model
        base = model.model.base_model
        layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
        if layers is None or norm is None or not hasattr(layers[-1], "mlp"):
            raise InputError("this benchmark takes models with layers as in Llama; give another")
        self._seen: dict[str, Tensor] = {}
        norm.register_forward_hook(lambda _, __, output: self._keep(FINAL, output))
        norm.register_forward_pre_hook(lambda _, inputs: self._keep(BEFORE, inputs[0]))
        layers[-1].mlp.register_forward_pre_hook(lambda _, inputs: self._keep(FEED_FORWARD, inputs[0]))
        after = layers[2 * len(layers) // 3]
        after.input_layernorm.register_forward_pre_hook(lambda _, inputs: self._keep(EARLIER, inputs[0]))

    def _keep(self, place: str, states: Tensor) -> None:
        self._seen[place] = states[0].half()

    def read(self, start: int, tokens: np.ndarray) -> dict[str, Tensor]:
        """Returns the states from which each token of a document is predicted, by place."""
        given = torch.from_numpy(np.append(start, tokens[:-1]).astype(np.int64))
        self._model.hidden(given[None])
        return dict(self._seen)


def tokenised(tokeniser: PretrainedTokeniser, texts: list[str], wanted: int) -> list[np.ndarray]:
    """Returns beginnings of the first texts that together have about as many tokens as wanted."""
    found: list[np.ndarray] = []
    for text in texts:
        if sum(map(len, found)) >= wanted:
            return found
        found.append(tokeniser.encode([text.encode()])[0][:_LONGEST])
    raise InputError(f"the texts have {sum(map(len, found)):,} tokens, {wanted:,} are asked for; ask for fewer")


def read_domain(
    name: str, places: PlacesInModel, tokeniser: PretrainedTokeniser, *, data: Path, tokens: tuple[int, int], work: Path
) -> DomainStates:
    """Reads a domain's articles with a model: about so many tokens for the memory, and for dev.

    What was read is kept in `work`, and not read again.
    """
    texts, _ = articles(data, 10_000, DOMAINS[name])
    memory = tokenised(tokeniser, texts, tokens[0])
    documents = memory + tokenised(tokeniser, texts[len(memory) :], tokens[1])
    file, parts = work / f"{name}-{tokens[0]}-{tokens[1]}.safetensors", []
    if not file.exists():
        with bar(f"read {name}", sum(map(len, documents))) as shown:
            for document in documents:
                parts.append(places.read(tokeniser.start, document))
                shown.advance(len(document))
        save_file({place: torch.cat([part[place] for part in parts]) for place in PLACES}, file)
    states = load_file(file)
    ends = np.cumsum([len(document) for document in documents])
    text = TokenStream(np.concatenate(documents), ends, lambda: ["document"] * len(ends), start=tokeniser.start)
    return DomainStates(name, text, len(memory), states)
