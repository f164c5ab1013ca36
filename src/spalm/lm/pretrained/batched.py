"""Pretrained models of Hugging Face that read pieces of several texts in one pass.

The keys and values of all texts are in one tensor for each layer, a row for each text, and a pass extends the rows of
the texts that it reads. A mask hides from each text what is beyond its end. Models that do not work in this way, such
as those in which some layers see only a window, read one text after another.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.errors import InputError
from spalm.lm.interface import Outputs
from spalm.lm.pretrained.model import PROBE, PretrainedModel, nearly_equal
from spalm.lm.pretrained.sequences import SequenceNumbers, SequenceState

_SHORT = 16
"""Number of tokens up to which pieces are read together; in longer ones the padding of the others would cost more."""
_FIRST_CAPACITY = 64
"""Number of tokens for which there is room at first; it is doubled when it is too small."""


class _Places:
    """Where the tokens of a pass belong: texts in rising order, and the positions of their tokens.

    Slices where they can be: assigning to a slice and reading one copies nothing and looks nothing up.
    """

    def __init__(self, texts: list[int], starts: list[int], *, time: int, device: torch.device):
        self.last_text, self.end, self.time = texts[-1], max(starts) + time, time
        """The last text, the number of tokens of the longest text after the pass, and those of each text in it."""
        self.positions = torch.tensor(starts, device=device)[:, None] + torch.arange(time, device=device)
        in_a_row, aligned = texts == list(range(texts[0], texts[-1] + 1)), len(set(starts)) == 1
        self.texts = slice(texts[0], texts[-1] + 1) if in_a_row else torch.tensor(texts, device=device)
        """Rows of the texts."""
        rows = torch.tensor(texts, device=device)[:, None]
        self.new = (self.texts, slice(starts[0], self.end)) if in_a_row and aligned else (rows, self.positions)
        """Rows and columns of the new tokens."""


class _KeysAndValues:
    """The keys and values of all texts, by layer; each tensor has the shape (texts, tokens, heads, width)."""

    def __init__(self) -> None:
        self._layers: dict[int, list[Tensor]] = {}

    def extend(self, layer: int, new: Sequence[Tensor], places: _Places) -> list[Tensor]:
        """Adds the keys and values (texts, heads, tokens, width) of new tokens, and returns all of these texts."""
        held = self._with_room(layer, new, places.last_text + 1, tokens=places.end)
        for all_texts, added in zip(held, new):
            all_texts[places.new] = added.transpose(1, 2)
        return [all_texts[places.texts, : places.end].transpose(1, 2) for all_texts in held]

    def copy(self, source: int, to: int, tokens: int) -> None:
        """Copies the first tokens of a text to another."""
        for layer, held in self._layers.items():
            self._layers[layer] = [_grown(each, to + 1, tokens) for each in held]
            for each in self._layers[layer]:
                each[to, :tokens] = each[source, :tokens]

    def _with_room(self, layer: int, new: Sequence[Tensor], texts: int, *, tokens: int) -> list[Tensor]:
        """Returns the tensors of a layer, large enough for so many texts and tokens."""
        held = self._layers.get(layer)
        if held is None:
            held = [each.new_zeros(0, 0, each.shape[1], each.shape[3]) for each in new]
        self._layers[layer] = [_grown(each, texts, tokens) for each in held]
        return self._layers[layer]


def _grown(held: Tensor, texts: int, tokens: int) -> Tensor:
    """Returns a tensor with room for so many texts and tokens, and with what was held. What is unused is 0."""
    if held.shape[0] >= texts and held.shape[1] >= tokens:
        return held
    capacity = max(_FIRST_CAPACITY, held.shape[1])
    while capacity < tokens:
        capacity *= 2
    larger = held.new_zeros(max(texts, held.shape[0]), capacity, *held.shape[2:])
    larger[: held.shape[0], : held.shape[1]] = held
    return larger


class _CacheOfPass:
    """What a model of transformers takes as its cache in one pass."""

    is_compileable = False

    def __init__(self, held: _KeysAndValues, places: _Places):
        self._held, self._places = held, places

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds the new tokens of a layer and returns the keys and values of all tokens."""
        found = self._held.extend(layer_idx, (keys, values), self._places)
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Returns the number of tokens before the pass, of the longest text."""
        return self._places.end - self._places.time


class BatchedPretrainedModel(PretrainedModel):
    """A model that reads pieces of several texts in one pass."""

    def __init__(self, model: PretrainedModel):
        """`model` must have been checked already."""
        self.__dict__.update(model.__dict__)
        self.can_shorten = True
        self.reserve(1)

    def reserve(self, texts: int) -> None:  # noqa: ARG002
        """Forgets all texts; room is made as it is needed."""
        self._sequences, self._held = SequenceNumbers(), _KeysAndValues()

    def empty_state(self, memory_length: int = 0, longest_segment: int = 0) -> Any:  # noqa: ARG002
        """Returns a state without tokens, whatever the lengths given."""
        return self._sequences.begin()

    def hidden(self, tokens: Int[Tensor, "batch time"], state: Any = None) -> Float[Tensor, "batch time width"]:
        """Returns h_t for every token; a state is taken into account and updated, for a batch of one text."""
        if state is None:
            return super().hidden(tokens)
        return self.read([(state, tokens[0].tolist())])[0].hidden[None]

    def shorten(self, state: SequenceState, tokens: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Forgets what a text has after its first `tokens` tokens."""
        state.tokens = tokens

    @torch.inference_mode()
    def copy_state(self, state: SequenceState) -> SequenceState:
        """Returns a state of its own for another text with the same beginning."""
        other = self.empty_state()
        self._held.copy(state.number, other.number, state.tokens)
        other.tokens = state.tokens
        return other

    @torch.inference_mode()
    def read(
        self, pieces: Sequence[tuple[SequenceState, Sequence[int]]], needed: Sequence[int] | None = None
    ) -> list[Outputs]:
        """Reads further tokens of several texts; returns hidden states of the last positions of each.

        `needed` is the number of these positions; None: all.
        """
        short = [number for number, (_, piece) in enumerate(pieces) if len(piece) <= _SHORT]
        long = [[number] for number, (_, piece) in enumerate(pieces) if len(piece) > _SHORT]
        found: dict[int, Tensor] = {}
        for group in [short, *long] if short else long:
            group.sort(key=lambda number: pieces[number][0].number)
            found.update(zip(group, self._pass([pieces[number] for number in group])))
        counts = [len(piece) for _, piece in pieces] if needed is None else needed
        return [Outputs(found[number][len(found[number]) - count :]) for number, count in enumerate(counts)]

    def _pass(self, pieces: Sequence[tuple[SequenceState, Sequence[int]]]) -> list[Float[Tensor, "time width"]]:
        """Reads pieces in one pass, padded to the same length, and returns their hidden states."""
        device, longest = self.device, max(len(piece) for _, piece in pieces)
        tokens = torch.tensor([[*piece, *[0] * (longest - len(piece))] for _, piece in pieces], device=device)
        numbers, starts = zip(*((state.number, state.tokens) for state, _ in pieces))
        places = _Places(list(numbers), list(starts), time=longest, device=device)
        hidden = self.model.base_model(
            input_ids=tokens,
            position_ids=self._known_positions(places.positions),
            attention_mask=self._mask(places),
            past_key_values=_CacheOfPass(self._held, places),
            use_cache=True,
        ).last_hidden_state.float()
        for state, piece in pieces:
            state.tokens += len(piece)
        return [row[: len(piece)] for row, (_, piece) in zip(hidden, pieces)]

    def _mask(self, places: _Places) -> Tensor:
        """Returns what is added to the scores of attention: the lowest number where a token must not look."""
        positions, dtype = places.positions, self.model.dtype
        beyond = torch.arange(places.end, device=positions.device) > positions[:, None, :, None]
        nothing = torch.zeros(beyond.shape, dtype=dtype, device=positions.device)
        return nothing.masked_fill(beyond, torch.finfo(dtype).min)

    def _known_positions(self, places: Int[Tensor, "texts time"]) -> Int[Tensor, "texts time"]:
        """Returns positions that the model knows: those of padding may be beyond the longest text."""
        return places if self.context_length is None else places.clamp_max(self.context_length - 1)

    @property
    def is_exact(self) -> bool:
        """Whether texts that are read together have the hidden states that each of them has alone."""
        texts = [[number % self.vocabulary for number in range(first, first + PROBE)] for first in (1, 5)]
        states = [self.empty_state() for _ in texts]
        try:
            begun = self.read([(states[0], texts[0][:3])])
            together = self.read([(states[0], texts[0][3:]), (states[1], texts[1])])
        except (AttributeError, IndexError, InputError, RuntimeError, TypeError, ValueError):
            return False
        found = [torch.cat([begun[0].hidden, together[0].hidden]), together[1].hidden]
        expected = super().hidden(torch.tensor(texts, device=self.device))
        return all(nearly_equal(one, other) for one, other in zip(found, expected))


def read_together_if_possible(model: PretrainedModel) -> PretrainedModel:
    """Returns a model that reads several texts in one pass or, if that is not exact, the model as it is."""
    window = getattr(model.config, "sliding_window", None)
    if window is not None and (model.context_length is None or window < model.context_length):
        return model
    batched = BatchedPretrainedModel(model)
    if not batched.is_exact:
        return model
    batched.reserve(1)
    return batched
