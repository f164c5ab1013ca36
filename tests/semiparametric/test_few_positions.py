"""The compiled mixture at a few positions: equal to the mixture of torch."""

from dataclasses import replace

import pytest
import torch

from spalm.memory import MISSING
from spalm.semiparametric import AdaptiveSettings, Matched, Retrieved
from spalm.semiparametric.examples import BaseOutputs
from spalm.semiparametric.matched import LEVELS
from spalm.semiparametric.mixture.adaptive import AdaptiveMixture
from spalm.semiparametric.mixture.few_positions import CompiledMixture

VOCABULARY, WIDTH, OCCURRENCES = 40, 8, 6


def mixture_of(neighbours: int, levels: int) -> AdaptiveMixture:
    """A mixture with parameters, means and spreads drawn at random."""
    found = AdaptiveMixture(AdaptiveSettings(seed=2), WIDTH, neighbours, levels=levels).initialise().eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
        found.mean.normal_(generator=random)
        found.spread.uniform_(0.5, 2.0, generator=random)
        found.usual_distance.fill_(1.7)
    return found.requires_grad_(requires_grad=False)


def retrieved_at(rows: int, neighbours: int, seed: int) -> Retrieved:
    """Neighbours and matches with many repeated tokens; some are missing, at some positions all of them."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY // 3, (rows, neighbours), generator=random)
    distances = (5 * torch.rand(rows, neighbours, generator=random)).sort(-1).values
    distances[torch.rand(rows, neighbours, generator=random) < 0.3] = torch.inf
    if neighbours:
        distances[0] = torch.inf
        distances[1, 0] = 0.0
    matched = torch.randint(0, VOCABULARY // 3, (rows, LEVELS, OCCURRENCES), generator=random)
    ids = torch.where(torch.rand(matched.shape, generator=random) < 0.4, MISSING, matched + 5)
    ids[0] = ids[2] = MISSING
    lengths = torch.randint(1, 20, (rows, LEVELS), generator=random) * (ids != MISSING).any(-1)
    counts = lengths * 3
    return Retrieved(tokens, distances, tokens, Matched(matched, ids, lengths.float(), counts.float()))


@pytest.mark.parametrize(("neighbours", "levels"), [(20, LEVELS), (20, 0), (0, LEVELS), (1, LEVELS)])
def test_few_positions_have_the_mixture_of_many(neighbours, levels):
    mixture = mixture_of(neighbours, levels)
    for seed in range(5):
        retrieved = retrieved_at(6, neighbours, seed)
        retrieved = retrieved if levels else replace(retrieved, matched=None)
        hidden, log_base = torch.randn(6, WIDTH), (3 * torch.randn(6, VOCABULARY)).log_softmax(-1)
        base = BaseOutputs.of(hidden, log_base, retrieved)
        weights = mixture(base, retrieved)
        expected = mixture.log_probabilities(log_base, retrieved, weights)
        found, others = CompiledMixture(mixture)(base, log_base, retrieved)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(others.log_sources, weights.log_sources, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(others.neighbours, weights.neighbours, atol=2e-5, rtol=2e-5)
        if levels:
            torch.testing.assert_close(others.matches, weights.matches, atol=2e-5, rtol=2e-5)
        assert torch.allclose(found.exp().sum(-1), torch.ones(6), atol=1e-5)
