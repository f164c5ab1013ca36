"""Figures of a fitted combiner: perplexities, and how much of the gain is left when fewer positions are searched."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spalm.attachment.base import PretrainedBase
from spalm.attachment.fitting.examples import ExampleSets, predict_in_batches
from spalm.attachment.fitting.gate_training import gate_log_probabilities
from spalm.attachment.fitting.learning import ABLATIONS, FittedCombiner, mixture_log_probabilities
from spalm.attachment.search_policy import search_threshold
from spalm.console import bar
from spalm.corpus import TokenStream
from spalm.lm import LanguageModel
from spalm.memory import MISSING, Entries
from spalm.semiparametric import BaseOutputs, Retrieved, TrainingExamples, advance_neighbours

SEARCHED_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Shares of searched positions at which the curve is measured."""


MATCH_LENGTHS = (8, 16, 32, 64)
"""Lengths of exact matches for which the share of positions is told."""


def overlap(examples: TrainingExamples) -> dict[str, float]:
    """Returns the share of positions whose last 8, 16, 32 or 64 tokens stand word for word in the memory."""
    matched = examples.retrieved.matched
    assert matched is not None
    longest = matched.lengths[:, 0]
    return {str(length): float((longest >= length).double().mean()) for length in MATCH_LENGTHS}


def perplexity(log_probabilities: Float[Tensor, "n"]) -> float:
    """Returns the perplexity per token of some log-probabilities."""
    return float(torch.exp(-log_probabilities.double().mean()))


def log_probabilities_of_rows(
    examples: TrainingExamples, fitted: FittedCombiner, model: LanguageModel
) -> dict[str, Float[Tensor, "n"]]:
    """Returns log p of the actual tokens by the model alone, and with everything that was fitted."""
    found = {"plain": examples.log_base}
    if fitted.knn is not None:
        knn = fitted.knn.target_log_probabilities(examples.log_base, examples.retrieved, examples.targets)
        found["knn-lm"] = knn
    for name, mixture in fitted.ablations.items():
        found[f"adaptive, {name}"] = mixture_log_probabilities(mixture, ABLATIONS[name](examples))
    found["adaptive"] = mixture_log_probabilities(fitted.mixture, examples)
    if fitted.gate is not None:
        found["gate"] = gate_log_probabilities(fitted.gate, model, examples)
    return found


def perplexities(rows: dict[str, Float[Tensor, "n"]]) -> dict[str, Any]:
    """Returns the perplexity per token of every row, and the number of tokens."""
    return {**{name: perplexity(found) for name, found in rows.items()}, "tokens": len(rows["plain"])}


def sums_by_document(rows: dict[str, Float[Tensor, "n"]], text: TokenStream) -> dict[str, list[float]]:
    """Returns the number of tokens of every document of a text and, for every row, the sum of log p over them.

    With these, intervals can be computed by drawing documents.
    """
    starts = torch.from_numpy(text.documents_of(np.arange(len(text))).astype(np.int64))
    lengths = torch.bincount(starts, minlength=len(text.ends))
    sums = {
        name: torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, starts, found.double()).tolist()
        for name, found in rows.items()
    }
    return {"tokens": lengths.tolist(), **sums}


@torch.no_grad()
def search_curve(
    base: PretrainedBase, fitted: FittedCombiner, examples: ExampleSets, *, entries: Entries
) -> list[dict[str, float]]:
    """Returns the perplexity of test by the share of positions that are searched; thresholds are quantiles on dev.

    Without keys nothing is searched for, and the list is empty.
    """
    test, policy = examples.test, fitted.policy
    if policy is None:
        return []
    gains_on_dev, gains_on_test = (policy(each.base.hidden) for each in (examples.dev, test))
    thresholds = [search_threshold(gains_on_dev, share) for share in SEARCHED_SHARES]
    searched = [gains_on_test > threshold for threshold in thresholds]
    neighbours = [advance_unsearched(test, each, examples.test_text, entries=entries) for each in searched]
    scores: list[list[Tensor]] = [[] for _ in SEARCHED_SHARES]
    with bar("search less", len(test)) as shown:
        for rows, log_probabilities in predict_in_batches(base, test.base.hidden):
            for found, retrieved in zip(scores, neighbours):
                outputs = BaseOutputs.of(test.base.hidden[rows], log_probabilities, retrieved[rows])
                batch = TrainingExamples(outputs, retrieved[rows], test.log_base[rows], test.targets[rows])
                found.append(fitted.mixture.target_log_probabilities(batch))
            shown.advance(len(rows))
    return [
        {
            "wanted": share,
            "threshold": threshold,
            "searched": float(chosen.double().mean()),
            "perplexity": perplexity(torch.cat(found)),
        }
        for share, threshold, chosen, found in zip(SEARCHED_SHARES, thresholds, searched, scores)
    ]


def advance_unsearched(
    examples: TrainingExamples, searched: Bool[Tensor, "n"], text: TokenStream, *, entries: Entries
) -> Retrieved:
    """Returns the neighbours of consecutive positions of a text when only some of them are searched.

    At the other positions, the neighbours of the position before are advanced, within the document.
    """
    retrieved, targets = examples.retrieved, examples.targets
    found = Retrieved(retrieved.tokens.clone(), retrieved.distances.clone(), retrieved.ids.clone(), retrieved.matched)
    found.distances[~searched] = torch.inf
    found.ids[~searched] = MISSING
    begins_document = torch.zeros(len(searched), dtype=torch.bool)
    begins_document[torch.from_numpy(text.begins[text.begins < len(searched)].astype(np.int64))] = True
    # All runs of unsearched positions at once: one step further from the last search in each round.
    now = searched.nonzero()[:, 0]
    while len(now := now[now + 1 < len(searched)] + 1):
        now = now[~searched[now] & ~begins_document[now]]
        advanced = advance_neighbours(found[now - 1], targets[now - 1], entries)
        found.tokens[now], found.distances[now], found.ids[now] = advanced.tokens, advanced.distances, advanced.ids
        now = now[advanced.present.any(-1)]
    return found
