"""Scoring positions of held-out text: log-probabilities of the actual tokens, and inputs of the mixtures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.corpus import Split, TokenSplit
from spalm.lm import LanguageModel, Reading, hidden_states
from spalm.lm.reading import refuse_divergence
from spalm.neighbours import MISSING
from spalm.semiparametric.examples import BaseOutputs
from spalm.semiparametric.gate import Gate, GateOutput
from spalm.semiparametric.retrieval import Retrieved, Retriever

_ROWS = 1024
"""Positions whose distributions over the vocabulary are held at a time."""


@dataclass(frozen=True)
class Scorer:
    """A language model, with its gate and its neighbours if it has a long-term memory."""

    model: LanguageModel
    gate: Gate | None = None
    retrievers: Mapping[Split, Retriever] | None = None
    """Neighbours of the positions of each split that is read."""
    log_probabilities_only: bool = False
    """Compute no inputs of mixtures and nothing about the gate, to save time."""

    def score(
        self, split: TokenSplit, positions: Int[np.ndarray, "n"], hidden: Float[Tensor, "n width"]
    ) -> dict[str, Tensor]:
        """Returns the rows of some positions in the arrays of `spalm.runs.records`, by the arrays' names."""
        targets = torch.from_numpy(split.targets(positions)).to(hidden.device)
        if self.retrievers is None:
            return {"log_probabilities": self.model.target_log_probabilities(hidden, targets)}
        retrieved = self.retrievers[split.split](positions).to(hidden.device)
        output, found = GateOutput.of_network(hidden), {}
        if self.gate is not None:
            attended = retrieved.nearest(self.gate.settings.attended)
            output = self.gate(hidden, attended, self.model)
            found["gate"], found["attention"] = output.gate.half(), output.attention.half()
            found["neighbours"], found["distances"] = attended.ids, attended.distances
            if self.gate.copier is not None:
                share = hidden.new_zeros(len(hidden)) if output.copied is None else output.copied.share
                found["copied"] = share.half()
        if self.log_probabilities_only:
            return {"log_probabilities": output.target_log_probabilities(self.model, targets)}
        if self.gate is not None:
            found["without_memory"] = self.model.target_log_probabilities(hidden, targets)
        parts = [
            self._outputs(hidden[rows], output[rows], retrieved[rows], targets=targets[rows])
            for rows in torch.arange(len(hidden), device=hidden.device).split(_ROWS)
        ]
        return {**found, **{name: torch.cat([part[name] for part in parts]) for name in parts[0]}}

    def _outputs(
        self, hidden: Tensor, output: GateOutput, retrieved: Retrieved, *, targets: Tensor
    ) -> dict[str, Tensor]:
        """Returns what needs the distribution over the vocabulary: log p of the targets, and inputs of mixtures."""
        log_probabilities = output.log_probabilities(self.model)
        base = BaseOutputs.of(hidden, log_probabilities, retrieved)
        of_matched = {} if base.of_matched is None else {"of_matched": base.of_matched.half()}
        return {
            **of_matched,
            "log_probabilities": log_probabilities.gather(-1, targets[:, None])[:, 0],
            "entropy": base.entropy,
            "highest": base.highest,
            "of_retrieved": base.of_retrieved.half(),
            "hidden": base.hidden.half(),
        }


def mean_loss(scorer: Scorer, split: TokenSplit, reading: Reading, *, stop: int) -> float:
    """Returns the mean negative log-likelihood of the first `stop` positions."""
    arrays = score_positions(scorer, split, reading, positions=range(stop))
    return -float(arrays["log_probabilities"].mean(dtype="float64"))


@torch.inference_mode()
def score_positions(
    scorer: Scorer,
    split: TokenSplit,
    reading: Reading,
    *,
    positions: range,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """Returns the arrays of all `positions`, by name; `progress` is called with the number of positions just done."""
    start, stop = positions.start, positions.stop
    arrays: dict[str, np.ndarray] = {}
    for group, hidden in hidden_states(scorer.model, split, reading, wanted=positions):
        for name, rows in scorer.score(split, group, hidden).items():
            found = rows.cpu().numpy()
            if name not in arrays:
                nothing_yet = np.nan if np.issubdtype(found.dtype, np.floating) else MISSING
                arrays[name] = np.full((stop - start, *found.shape[1:]), nothing_yet, found.dtype)
            arrays[name][group - start] = found
        progress(len(group))
    refuse_divergence(arrays["log_probabilities"])
    return arrays
