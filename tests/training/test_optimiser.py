import pytest
import torch

from spalm.training import OptimiserSettings
from spalm.training.optimiser import learning_rate, make_optimiser


def test_warm_up_and_cosine():
    settings = OptimiserSettings(learning_rate=1.0, warm_up=10, final_share=0.1)
    rates = [learning_rate(settings, step, 110) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[109] == pytest.approx(0.1, abs=0.001)


def test_other_decays():
    steady = OptimiserSettings(learning_rate=1.0, warm_up=4, decay="none")
    assert learning_rate(steady, 99, 100) == 1.0
    root = OptimiserSettings(learning_rate=1.0, warm_up=4, decay="inverse-sqrt")
    assert learning_rate(root, 3, 100) == 1.0
    assert learning_rate(root, 15, 100) == pytest.approx(0.5)


def test_only_matrices_decay():
    model = torch.nn.Linear(3, 2)
    optimiser = make_optimiser(OptimiserSettings(learning_rate=1.0, weight_decay=0.1), model)
    assert [(len(group["params"]), group["weight_decay"]) for group in optimiser.param_groups] == [(1, 0.1), (1, 0.0)]


def test_taking_over_the_rate_rises_to_the_schedule():
    settings = OptimiserSettings(learning_rate=0.1, warm_up=10)
    assert learning_rate(settings, 500, 1000, first_step=500) == pytest.approx(learning_rate(settings, 500, 1000) / 50)
    assert learning_rate(settings, 549, 1000, first_step=500) == learning_rate(settings, 549, 1000)
    assert learning_rate(settings, 700, 1000, first_step=500) == learning_rate(settings, 700, 1000)
