"""Learning of everything that brings a memory into a frozen model's predictions.

The mixture learns from training positions; a few of its numbers are then calibrated on dev, where kNN-LM and the
continuous cache are tuned too. The policy learns where a search pays. The gate is trained only if it is asked for.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from spalm.attachment.examples import ExampleSets
from spalm.attachment.gate_training import learn_gate
from spalm.attachment.policy import SearchPolicy, learn_policy
from spalm.attachment.settings import AttachSettings
from spalm.console import bar
from spalm.lm.pretrained import PretrainedModel
from spalm.semiparametric import AdaptiveMixture, Gate, Knn, TrainingExamples, learn_mixture, tune_knn
from spalm.semiparametric.adaptive import calibrate

_BATCH = 2048
"""Positions that are scored at a time."""


@dataclass(frozen=True)
class FittedCombiner:
    """Everything that is learned when a memory is attached."""

    mixture: AdaptiveMixture
    policy: SearchPolicy
    knn: Knn
    """The weight, temperature and number of neighbours of kNN-LM."""
    cache: Knn
    """The weight, temperature and number of neighbours of the continuous cache."""
    gate: Gate | None = None
    """The paper's gate, if it was asked for."""


def fit_combiner(settings: AttachSettings, examples: ExampleSets, model: PretrainedModel) -> FittedCombiner:
    """Learns a combiner from positions of the training documents and tunes it on dev."""
    train, dev = examples.train, examples.dev
    knn, _ = tune_knn(dev.log_base, dev.retrieved, dev.targets, settings.knn)
    cache, _ = tune_knn(dev.log_base, examples.dev_past, dev.targets, settings.knn)
    with bar("learn the mixture", None):
        mixture = calibrate(learn_mixture(settings.adaptive, train.concatenate(examples.questions)), dev)
        # Without a search a position has advanced neighbours or, further from the last search, none.
        without_search = (mixture_log_probabilities(mixture, examples.advanced) + train.log_base) / 2
        gains = mixture_log_probabilities(mixture, train) - without_search
        policy = learn_policy(settings.policy, train.base.hidden, gains)
    gate = learn_gate(settings.gate, settings.gate_training, model, train) if settings.combiner == "gate" else None
    return FittedCombiner(mixture, policy, knn, cache, gate)


@torch.no_grad()
def mixture_log_probabilities(mixture: AdaptiveMixture, examples: TrainingExamples) -> Float[Tensor, "n"]:
    """Returns log p of the actual token at each position under the mixture."""
    return torch.cat([mixture.target_log_probabilities(batch) for batch in examples.batches(_BATCH)])
