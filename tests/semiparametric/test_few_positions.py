"""The compiled mixture at a few positions: equal to the mixture of torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spalm.memory import MISSING
from spalm.semiparametric import AdaptiveSettings, Matched, Retrieved
from spalm.semiparametric.examples import LEAST_LOG_P, BaseOutputs
from spalm.semiparametric.matched import LEVELS
from spalm.semiparametric.mixture import kernels
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
        shares = weights.log_shares_of_memory.exp()
        with torch.no_grad():
            logits = log_base + 30 * torch.randn(6, 1)
            found, base_share, of_neighbours, of_matches = CompiledMixture(mixture)(hidden, logits, retrieved)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(base_share, weights.base_share, atol=2e-5, rtol=2e-5)
        in_memory = shares[:, :1] * weights.neighbours * retrieved.present
        torch.testing.assert_close(of_neighbours, in_memory, atol=2e-5, rtol=2e-5)
        if weights.matches is not None:
            torch.testing.assert_close(of_matches, shares[:, 1:, None] * weights.matches, atol=2e-5, rtol=2e-5)
        assert torch.allclose(found.exp().sum(-1), torch.ones(6), atol=1e-5)


def test_few_positions_have_the_outputs_of_the_base_over_a_large_vocabulary():
    scores = torch.cat([5 * torch.randn(3, 50_000), torch.full((1, 50_000), -2.0), torch.zeros(1, 50_000)])
    scores[3, 17], scores[4, 5] = 200.0, -torch.inf
    tokens, matched = torch.randint(0, 50_000, (5, 9)), torch.randint(0, 50_000, (5, 2, 3))
    log_base = scores.log_softmax(-1)
    expected = BaseOutputs.of(
        torch.zeros(5, 1), log_base.nan_to_num(neginf=-1e9), Retrieved(tokens, tokens * 0.0, tokens)
    )
    found = np.empty(scores.shape, np.float32)
    numbers = np.empty(5, np.float32), np.empty(5, np.float32)
    of_tokens = np.empty(tokens.shape, np.float32), np.empty(matched.shape, np.float32)
    kernels.base_outputs(scores.numpy(), tokens.numpy(), matched.numpy(), LEAST_LOG_P, found, (*numbers, *of_tokens))
    torch.testing.assert_close(torch.from_numpy(found), log_base, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.from_numpy(numbers[0]), expected.entropy, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(torch.from_numpy(numbers[1]), expected.highest, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.from_numpy(of_tokens[0]), expected.of_retrieved, atol=1e-5, rtol=1e-5)
    found_of_matched = log_base.gather(-1, matched.flatten(1)).clamp_min(LEAST_LOG_P).view(matched.shape)
    torch.testing.assert_close(torch.from_numpy(of_tokens[1]), found_of_matched, atol=1e-5, rtol=1e-5)
