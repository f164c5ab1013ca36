"""Scoring positions of held-out text: log-probabilities of the tokens that came, and what mixtures learn from."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.corpus import Split, TokenSplit
from spalm.lm import LanguageModel, Reading, hidden_states
from spalm.lm.reading import refuse_divergence
from spalm.neighbours import MISSING
from spalm.semiparametric.adaptive import BaseOutputs
from spalm.semiparametric.gate import Gate
from spalm.semiparametric.retrieval import Retrieved, Retriever

_ROWS = 1024
"""Positions whose distributions over the vocabulary are held at a time."""


@dataclass(frozen=True)
class Scorer:
    """A model, and what it uses besides its short-term memory."""

    model: LanguageModel
    gate: Gate | None = None
    retrievers: dict[Split, Retriever] | None = None
    everything: bool = True
    """Not only log-probabilities."""

    def score(self, split: TokenSplit, positions: Int[np.ndarray, "n"], hidden: Float[Tensor, "n width"]):
        """The arrays' rows of some positions, by name."""
        targets = torch.from_numpy(split.targets(positions)).to(hidden.device)
        if self.retrievers is None:
            return {"log_probabilities": self.model.target_log_probabilities(hidden, targets)}
        retrieved = self.retrievers[split.split](positions).to(hidden.device)
        found, mixed = {}, hidden
        if self.gate is not None:
            attended = retrieved.first(self.gate.settings.neighbours)
            through = self.gate(hidden, attended, self.model)
            mixed = through.vectors
            found["gate"], found["attention"] = through.gate.half(), through.attention.half()
            found["neighbours"], found["distances"] = attended.ids, attended.distances
        if not self.everything:
            return {"log_probabilities": self.model.target_log_probabilities(mixed, targets)}
        if self.gate is not None:
            found["without_memory"] = self.model.target_log_probabilities(hidden, targets)
        parts = [
            self._outputs(hidden[rows], mixed[rows], retrieved[rows], targets[rows])
            for rows in torch.arange(len(hidden), device=hidden.device).split(_ROWS)
        ]
        return {**found, **{name: torch.cat([part[name] for part in parts]) for name in parts[0]}}

    def _outputs(self, hidden: Tensor, mixed: Tensor, retrieved: Retrieved, targets: Tensor) -> dict[str, Tensor]:
        log_probabilities = self.model.log_probabilities(mixed)
        base = BaseOutputs.of(hidden, log_probabilities, retrieved)
        return {
            "log_probabilities": log_probabilities.gather(-1, targets[:, None])[:, 0],
            "entropy": base.entropy,
            "highest": base.highest,
            "of_retrieved": base.of_retrieved.half(),
            "hidden": base.hidden.half(),
        }


def mean_loss(scorer: Scorer, split: TokenSplit, reading: Reading, stop: int) -> float:
    """Returns the mean negative log-likelihood of the first `stop` positions."""
    arrays = score_positions(scorer, split, reading, range(stop))
    return -float(arrays["log_probabilities"].mean(dtype="float64"))


@torch.inference_mode()
def score_positions(
    scorer: Scorer,
    split: TokenSplit,
    reading: Reading,
    positions: range,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """Returns the arrays of all `positions`, by name; `progress` is told how many more are done."""
    start, stop = positions.start, positions.stop
    arrays: dict[str, np.ndarray] = {}
    for group, hidden in hidden_states(scorer.model, split, reading, positions):
        for name, rows in scorer.score(split, group, hidden).items():
            found = rows.cpu().numpy()
            if name not in arrays:
                nothing_yet = np.nan if np.issubdtype(found.dtype, np.floating) else MISSING
                arrays[name] = np.full((stop - start, *found.shape[1:]), nothing_yet, found.dtype)
            arrays[name][group - start] = found
        progress(len(group))
    refuse_divergence(arrays["log_probabilities"])
    return arrays
