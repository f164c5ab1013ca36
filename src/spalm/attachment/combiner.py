"""Learning and measuring a combiner: the mixture, the policy of searching, kNN-LM's setting and, if wanted, the gate.

The mixture learns from training positions; a few of its numbers are then calibrated on dev, where kNN-LM is tuned too.
On test nothing is tuned.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spalm.attachment.base import PretrainedBase
from spalm.attachment.examples import ExampleSets, predictions
from spalm.attachment.gate import learn_gate
from spalm.attachment.policy import SearchPolicy, learn_policy
from spalm.attachment.settings import AttachSettings
from spalm.console import bar
from spalm.corpus import TokenStream
from spalm.lm.pretrained import Pretrained
from spalm.memory import MISSING, Entries
from spalm.semiparametric import (
    AdaptiveMixture,
    BaseOutputs,
    Gate,
    Knn,
    Retrieved,
    TrainingExamples,
    advance_neighbours,
    learn_mixture,
    tune_knn,
)
from spalm.semiparametric.adaptive import calibrate

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Shares of positions that are searched, on the curve."""


_ROWS = 2048
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


def fit_combiner(settings: AttachSettings, examples: ExampleSets, model: Pretrained) -> FittedCombiner:
    """Learns a combiner from positions of the training documents and tunes it on dev."""
    knn, _ = tune_knn(examples.dev.log_base, examples.dev.retrieved, examples.dev.targets, settings.knn)
    cache, _ = tune_knn(examples.dev.log_base, examples.dev_past, examples.dev.targets, settings.knn)
    with bar("learn the mixture", None):
        mixture = learn_mixture(settings.adaptive, examples.train.concatenate(examples.questions))
        mixture = calibrate(mixture, examples.dev)
        # Without a search a position has advanced neighbours or, further from the last search, none.
        otherwise = (mixture_log_probabilities(mixture, examples.advanced) + examples.train.log_base) / 2
        gains = mixture_log_probabilities(mixture, examples.train) - otherwise
        policy = learn_policy(settings.policy, examples.train.base.hidden, gains)
    wanted = settings.combiner == "gate"
    gate = learn_gate(settings.gate, settings.gate_training, model, examples.train) if wanted else None
    return FittedCombiner(mixture, policy, knn, cache, gate)


@torch.no_grad()
def mixture_log_probabilities(mixture: AdaptiveMixture, examples: TrainingExamples) -> Tensor:
    """Returns log p of the token that came at each position, by the mixture."""
    parts = (examples[rows] for rows in torch.arange(len(examples)).split(_ROWS))
    return torch.cat([mixture.target_log_probabilities(part) for part in parts])


def perplexity(log_probabilities: Tensor) -> float:
    """Returns the perplexity per token of some log-probabilities."""
    return float(torch.exp(-log_probabilities.double().mean()))


def perplexities(examples: TrainingExamples, fitted: FittedCombiner, model: Pretrained) -> dict[str, Any]:
    """Returns perplexities per token: the model alone, with kNN-LM, with the mixture, with the gate if there is one."""
    knn = fitted.knn.target_log_probabilities(examples.log_base, examples.retrieved, examples.targets)
    return {
        "plain": perplexity(examples.log_base),
        "knn-lm": perplexity(knn),
        "adaptive": perplexity(mixture_log_probabilities(fitted.mixture, examples)),
        **({} if fitted.gate is None else {"gate": perplexity(gate_log_probabilities(fitted.gate, model, examples))}),
        "tokens": len(examples),
    }


@torch.no_grad()
def search_curve(
    base: PretrainedBase, fitted: FittedCombiner, examples: ExampleSets, entries: Entries
) -> list[dict[str, float]]:
    """Returns the perplexity of test by the share of positions searched; thresholds are dev's quantiles."""
    test, text = examples.test, examples.test_text
    on_dev, on_test = (fitted.policy(each.base.hidden) for each in (examples.dev, test))
    thresholds = [search_threshold(on_dev, share) for share in SHARES]
    chosen = [on_test > least for least in thresholds]
    have = [advance_unsearched(test.retrieved, each, test.targets, text, entries) for each in chosen]
    scores: list[list[Tensor]] = [[] for _ in SHARES]
    with bar("search less", len(test)) as shown:
        for rows, log_probabilities in predictions(base, test.base.hidden):
            for found, retrieved in zip(scores, have):
                part = retrieved[rows]
                outputs = BaseOutputs.of(test.base.hidden[rows], log_probabilities, part)
                here = TrainingExamples(outputs, part, test.log_base[rows], test.targets[rows])
                found.append(fitted.mixture.target_log_probabilities(here))
            shown.advance(len(rows))
    return [
        {
            "wanted": share,
            "threshold": least,
            "searched": float(each.double().mean()),
            "perplexity": perplexity(torch.cat(found)),
        }
        for share, least, each, found in zip(SHARES, thresholds, chosen, scores)
    ]


def advance_unsearched(
    retrieved: Retrieved, chosen: Tensor, targets: Tensor, text: TokenStream, entries: Entries
) -> Retrieved:
    """Returns the neighbours of positions when only the chosen ones are searched; others advance from the one before."""
    have = Retrieved(retrieved.tokens.clone(), retrieved.distances.clone(), retrieved.ids.clone())
    have.distances[~chosen] = torch.inf
    have.ids[~chosen] = MISSING
    first = torch.zeros(len(chosen), dtype=torch.bool)
    first[torch.from_numpy(text.begins[text.begins < len(chosen)].astype(np.int64))] = True
    now = chosen.nonzero()[:, 0]
    while len(now := now[now + 1 < len(chosen)] + 1):
        now = now[~chosen[now] & ~first[now]]
        advanced = advance_neighbours(have[now - 1], targets[now - 1], entries)
        have.tokens[now], have.distances[now], have.ids[now] = advanced.tokens, advanced.distances, advanced.ids
        now = now[advanced.present.any(-1)]
    return have
