"""Learning of everything that brings a memory into a frozen model's predictions.

The mixture learns from training positions, and from text that the model writes by itself; a few of its numbers are then
calibrated on dev, where kNN-LM and the continuous cache are tuned too. The policy learns where a search pays. The gate
is trained only if it is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from spalm.attachment.fitting.examples import ExampleSets
from spalm.attachment.fitting.gate_training import learn_gate
from spalm.attachment.search_policy import SearchPolicy, learn_policy
from spalm.attachment.settings import AttachSettings
from spalm.console import bar
from spalm.lm import LanguageModel
from spalm.semiparametric import AdaptiveMixture, AdaptiveSettings, Gate, Knn, TrainingExamples, learn_mixture, tune_knn
from spalm.semiparametric.mixture.adaptive import calibrate

_LEAST_STEPS = 1000
"""Training steps of a mixture that also learns from the model's own text: keeping out of it takes longer to learn."""
_UNSEARCHED_SHARE = 4
"""Number of training positions for each one that is also learned from without neighbours."""
_BATCH = 2048
"""Positions that are scored at a time."""

ABLATIONS: dict[str, Callable[[TrainingExamples], TrainingExamples]] = {
    "nearest only": TrainingExamples.without_matches,
    "exact only": TrainingExamples.without_neighbours,
}
"""Ways to take one of two sources away."""


@dataclass(frozen=True)
class FittedCombiner:
    """Everything that is learned when a memory is attached."""

    mixture: AdaptiveMixture
    """The mixture of all sources that the memory has."""
    ablations: dict[str, AdaptiveMixture]
    """The mixture of each source alone, where there are two; only measured."""
    policy: SearchPolicy | None = None
    """Decides where to search for nearest contexts; None: there are none."""
    knn: Knn | None = None
    """The weight, temperature and number of neighbours of kNN-LM; None: there are no nearest contexts."""
    cache: Knn | None = None
    """The same of the continuous cache."""
    gate: Gate | None = None
    """The paper's gate, if it was asked for."""


def fit_combiner(settings: AttachSettings, examples: ExampleSets, model: LanguageModel) -> FittedCombiner:
    """Learns a combiner from positions of the training documents and tunes it on dev."""
    train, dev = examples.train, examples.dev
    with bar("learn the mixture", None):
        learned, kept = _divided(examples.own)
        learned_from = train.concatenate(examples.questions).concatenate(learned)
        # Calibrated on dev alone, it would trust the memory everywhere as much as it may be trusted in its domain.
        calibrated_on = dev.concatenate(kept)
        if train.retrieved.matched is not None and examples.dev_past is not None:
            learned_from = learned_from.concatenate(_unsearched(train))
        adaptive = _with_enough_passes(settings, len(learned_from))
        mixture = calibrate(learn_mixture(adaptive, learned_from), calibrated_on)
        if examples.dev_past is None:
            return FittedCombiner(mixture, {})
        ablations = {
            name: calibrate(learn_mixture(adaptive, keep(learned_from)), keep(calibrated_on))
            for name, keep in ABLATIONS.items()
            if dev.retrieved.matched is not None
        }
    knn, _ = tune_knn(dev.log_base, dev.retrieved, dev.targets, settings=settings.knn)
    cache, _ = tune_knn(dev.log_base, examples.dev_past, dev.targets, settings=settings.knn)
    with bar("learn the search policy", None):
        # Without a search a position has advanced neighbours or, further from the last search, none.
        without_search = (mixture_log_probabilities(mixture, examples.advanced) + train.log_base) / 2
        gains = mixture_log_probabilities(mixture, train) - without_search
        policy = learn_policy(settings.policy, train.base.hidden, gains)
    gate = (
        learn_gate(settings.gate, settings.gate_training, model, examples=train)
        if settings.combiner == "gate"
        else None
    )
    return FittedCombiner(mixture, ablations, policy, knn, cache, gate)


def _with_enough_passes(settings: AttachSettings, count: int) -> AdaptiveSettings:
    """Returns the settings of the mixture, with more passes over `count` positions if there is text of the model's."""
    adaptive = settings.adaptive
    if not settings.own_text:
        return adaptive
    steps_of_pass = -(-count // adaptive.batch_size)
    return adaptive.model_copy(update={"passes": max(adaptive.passes, -(-_LEAST_STEPS // steps_of_pass))})


def _divided(examples: TrainingExamples) -> tuple[TrainingExamples, TrainingExamples]:
    """Returns examples to learn from, and a quarter of them to calibrate on."""
    place = len(examples) - len(examples) // 4
    return examples[:place], examples[place:]


def _unsearched(train: TrainingExamples) -> TrainingExamples:
    """Returns some of the positions as they are where nothing was searched for: with exact matches alone."""
    some = train[torch.arange(0, len(train), _UNSEARCHED_SHARE)]
    return replace(some, retrieved=some.retrieved.without_neighbours())


@torch.no_grad()
def mixture_log_probabilities(mixture: AdaptiveMixture, examples: TrainingExamples) -> Float[Tensor, "n"]:
    """Returns log p of the actual token at each position under the mixture."""
    return torch.cat([mixture.target_log_probabilities(batch) for batch in examples.batches(_BATCH)])
