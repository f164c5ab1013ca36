"""Reading in several threads on a CPU: each of them takes some of the lanes."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.compute import map_in_threads
from spalm.lm.interface import LanguageModel


class LaneThreads:
    """A language model that reads the lanes of a batch in several threads. Its state is a list: one for each thread."""

    def __init__(self, model: LanguageModel, count: int):
        self._model, self._count = model, count
        self.width, self.context_length, self.device = model.width, model.context_length, model.device

    def empty_state(self, memory_length: int, longest_segment: int) -> list[Any]:
        """Returns a state without tokens for each thread."""
        return [self._model.empty_state(memory_length, longest_segment) for _ in range(self._count)]

    def hidden(self, tokens: Int[Tensor, "batch time"], state: list[Any] | None) -> Float[Tensor, "batch time width"]:
        """Returns h_t for every token; the states are updated in place."""
        return self._map(self._model.hidden, tokens.chunk(self._count), state or [None] * self._count)

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """Returns y: the vectors of tokens in the table that the output layer uses."""
        return self._model.embed(tokens)

    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary."""
        return self._model.log_probabilities(hidden)

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Returns log p of one token for each row."""
        parts = hidden.chunk(self._count), targets.chunk(self._count)
        return self._map(self._model.target_log_probabilities, *parts)

    def _map(self, function: Any, parts: tuple[Tensor, ...], *others: Any) -> Tensor:
        """Applies a function to the parts of a batch in threads, and joins the results."""
        if len(parts) == 1:
            return function(parts[0], *(other[0] for other in others))
        return torch.cat(map_in_threads(torch.inference_mode()(function), parts, *others, count=self._count))


def with_lane_threads(model: LanguageModel) -> LanguageModel:
    """Returns a model that reads lanes in as many threads as torch uses; for a GPU or one thread, the model itself."""
    count = torch.get_num_threads()
    if model.device.type != "cpu" or count == 1 or isinstance(model, LaneThreads):
        return model
    return LaneThreads(model, count)
