"""kNN-LM beside a dictionary, its tuner beside every point of its grid; every mixture a distribution."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from spalm.memory import MISSING
from spalm.memory.exact import OCCURRENCES
from spalm.semiparametric import (
    AdaptiveMixture,
    AdaptiveSettings,
    BaseOutputs,
    Knn,
    KnnSettings,
    Matched,
    Retrieved,
    TrainingExamples,
    learn_mixture,
    tune_knn,
)
from spalm.semiparametric.matched import LEVELS

N, K, D, V = 11, 5, 6, 17


def neighbours(missing: bool = True) -> Retrieved:
    distances = torch.sort(torch.rand(N, K) * 3).values
    if missing:
        distances[2, 3:] = torch.inf
        distances[5] = torch.inf
    return Retrieved(torch.randint(V // 3, (N, K)), distances, torch.arange(N * K).view(N, K))


def base() -> torch.Tensor:
    return torch.log_softmax(2 * torch.randn(N, V), -1)


def test_knn_is_the_dictionary():
    retrieved, log_base = neighbours(), base()
    knn = Knn(weight=0.3, temperature=0.7, count=4)
    found = knn.log_probabilities(log_base, retrieved)
    for n in range(N):
        mass: dict[int, float] = {}
        total = 0.0
        for token, distance in zip(retrieved.tokens[n, :4].tolist(), retrieved.distances[n, :4].tolist()):
            if math.isfinite(distance):
                mass[token] = mass.get(token, 0.0) + math.exp(-distance / 0.7)
                total += math.exp(-distance / 0.7)
        weight = 0.3 if total else 0.0
        for token in range(V):
            expected = (1 - weight) * math.exp(log_base[n, token])
            expected += weight * mass.get(token, 0.0) / total if total else 0.0
            assert math.exp(found[n, token]) == pytest.approx(expected, rel=1e-4)


def test_of_one_token_as_of_all():
    retrieved, log_base = neighbours(), base()
    targets = torch.randint(V, (N,))
    knn = Knn(0.25, 0.5, 3)
    whole = knn.log_probabilities(log_base, retrieved).gather(1, targets[:, None])[:, 0]
    own = log_base.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(knn.target_log_probabilities(own, retrieved, targets), whole)


@pytest.mark.parametrize("weight", [0.0, 0.4, 0.95])
def test_knn_lm_sums_to_one(weight):
    found = Knn(weight, 1.3, K).log_probabilities(base(), neighbours())
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(N))


def matches() -> Matched:
    """Matches of which some are missing, and some occur at few places."""
    shape = (N, LEVELS, OCCURRENCES)
    ids = torch.where(torch.rand(shape) < 0.5, torch.randint(100, shape), MISSING)
    ids[torch.rand(shape[:2]) < 0.3] = MISSING
    some = (ids != MISSING).any(-1)
    return Matched(torch.randint(V, shape), ids, some * torch.randint(1, 9, shape[:2]).float(), some * 3.0)


@pytest.mark.parametrize("sources", [("neighbours",), ("matches",), ("neighbours", "matches")])
def test_the_adaptive_mixture_sums_to_one(sources):
    retrieved, log_base = neighbours(), base()
    count, levels = (K if "neighbours" in sources else 0), (LEVELS if "matches" in sources else 0)
    retrieved = replace(retrieved.nearest(count), matched=matches() if levels else None)
    mixture = AdaptiveMixture(AdaptiveSettings(), D, count, levels=levels).initialise().eval()
    mixture.network[-1].weight.data.normal_()
    outputs = BaseOutputs.of(torch.randn(N, D), log_base, retrieved)
    mixture.fit_feature_scales(outputs, retrieved)
    found = mixture.log_probabilities(log_base, retrieved, mixture(outputs, retrieved))
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(N))
    targets = torch.randint(V, (N,))
    own = log_base.gather(1, targets[:, None])[:, 0]
    one = mixture.target_log_probabilities(TrainingExamples(outputs, retrieved, own, targets))
    torch.testing.assert_close(one, found.gather(1, targets[:, None])[:, 0], rtol=1e-4, atol=1e-5)


def test_the_tuner_finds_the_best_point_of_its_grid():
    retrieved, log_base = neighbours(), base()
    targets = torch.where(torch.rand(N) < 0.6, retrieved.tokens[:, 0], torch.randint(V, (N,)))
    own = log_base.gather(1, targets[:, None])[:, 0]
    settings = KnnSettings(lambdas=[0.0, 0.2, 0.5, 0.8], counts=[1, 3, 99], temperatures=[0.1, 1.0, 9.0])
    best, found = tune_knn(own, retrieved, targets, settings=settings)
    everything = {
        (weight, temperature, count): float(
            Knn(weight, temperature, count).target_log_probabilities(own, retrieved, targets).mean()
        )
        for weight in settings.lambdas
        for temperature in settings.temperatures
        for count in (1, 3, K)
    }
    assert found == pytest.approx(max(everything.values()), rel=1e-5)
    assert everything[best.weight, best.temperature, best.count] == pytest.approx(found, rel=1e-5)


def test_lambda_zero_is_the_model_itself():
    retrieved, log_base = neighbours(), base()
    torch.testing.assert_close(Knn(0.0, 1.0, K).log_probabilities(log_base, retrieved), log_base)


def examples(count: int, seed: int) -> TrainingExamples:
    """The first neighbour is right exactly where the hidden state's first number is positive."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, D, generator=random)
    tokens = torch.randint(V, (count, K), generator=random)
    anything = torch.randint(V, (count,), generator=random)
    targets = torch.where(hidden[:, 0] > 0, tokens[:, 0], anything)
    log_base = torch.full((count, V), -math.log(V))
    retrieved = Retrieved(tokens, torch.arange(K).expand(count, K) * 2.0 + 1.0, tokens)
    outputs = BaseOutputs.of(hidden, log_base, retrieved)
    return TrainingExamples(outputs, retrieved, log_base.gather(1, targets[:, None])[:, 0], targets)


def test_the_adaptive_mixture_learns_when_to_trust_its_neighbours():
    settings = AdaptiveSettings(width=16, passes=20, batch_size=256, learning_rate=0.01, dropout=0.0)
    mixture = learn_mixture(settings, examples(2000, 1))
    other = examples(500, 2)
    weights = mixture(other.base, other.retrieved)
    weight = 1 - weights.base_share
    trusted = other.base.hidden[:, 0] > 0.3
    assert weight[trusted].mean() > 0.8
    assert weight[other.base.hidden[:, 0] < -0.3].mean() < 0.3
    assert weights.neighbours[trusted, 0].mean() > 0.8
    again = learn_mixture(settings, examples(2000, 1))
    for one, same in zip(mixture.state_dict().values(), again.state_dict().values()):
        assert torch.equal(one, same)


def test_what_the_base_finds_all_but_impossible_stays_so():
    retrieved = neighbours(missing=False)
    log_base = torch.full((N,), -90.0)
    outputs = BaseOutputs.of(torch.randn(N, D), base(), retrieved)
    mixture = AdaptiveMixture(AdaptiveSettings(), D, K).initialise().eval()
    mixture.fit_feature_scales(outputs, retrieved)
    unlikely = TrainingExamples(outputs, retrieved, log_base, torch.full((N,), V - 1))
    found = mixture.target_log_probabilities(unlikely)
    assert (found < -85).all()


def test_a_fixed_weight_does_worse_there():
    settings = AdaptiveSettings(width=16, passes=20, batch_size=256, learning_rate=0.01, dropout=0.0)
    mixture, other = learn_mixture(settings, examples(2000, 1)), examples(500, 2)
    adaptive = mixture.target_log_probabilities(other).mean()
    _, fixed = tune_knn(other.log_base, other.retrieved, other.targets, settings=KnnSettings())
    assert float(adaptive) > fixed + 0.1
    assert np.isfinite(fixed)
