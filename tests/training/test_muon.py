"""Muon: updates with singular values of about one, and torch's own Muon and Adam as oracles."""

import pytest
import torch
from torch import nn

from spalm.training import OptimiserSettings
from spalm.training.muon import orthogonalised
from spalm.training.optimiser import make_optimiser


@pytest.mark.parametrize("shape", [(5, 11), (11, 5), (7, 7)])
def test_singular_values_become_about_one_and_singular_vectors_stay(shape):
    matrices = torch.randn(3, *shape)
    for matrix in matrices:
        found = orthogonalised(matrix, 6)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        inner = left.T @ found @ right.T
        after = inner.diagonal()[values > 0.05 * values.norm()]
        assert (after > 0.6).all()
        assert (after < 1.3).all()
        torch.testing.assert_close(inner, torch.diag(inner.diagonal()), atol=1e-4, rtol=0)


def test_in_bfloat16_it_is_nearly_the_same():
    matrix = torch.randn(11, 29)
    exact, rounded = orthogonalised(matrix, 5), orthogonalised(matrix, 5, bf16=True)
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()


class Small(nn.Module):
    """Two layers of one shape, one of another, and what Muon leaves to Adam."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.table = nn.Parameter(torch.randn(11, 5))


def step(model: nn.Module, optimisers: list, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = 0.01 * (seed + 1)
        optimiser.step()


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_torchs_muon_for_linear_layers_and_adam_for_the_rest(threads):
    torch.manual_seed(0)
    ours, theirs = Small(), Small()
    theirs.load_state_dict(ours.state_dict())
    settings = OptimiserSettings(kind="muon", learning_rate=1.0, weight_decay=0.1, muon_momentum=0.9)
    own = make_optimiser(settings, ours, threads=threads)
    weights = [theirs.first.weight, theirs.second.weight, theirs.third.weight]
    biases = [theirs.first.bias, theirs.second.bias]
    betas = settings.beta1, settings.beta2
    # A mean of gradients and their sum differ by a factor only, which orthogonalising removes.
    torchs = [
        torch.optim.Muon(weights, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs.table], betas=betas, weight_decay=0.1),
        torch.optim.AdamW(biases, betas=betas, weight_decay=0.0),
    ]
    for seed in range(4):
        step(ours, [own], seed)
        step(theirs, torchs, seed)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters()):
        # torch orthogonalises in bfloat16
        torch.testing.assert_close(mine, other, atol=2e-2 if "weight" in name else 1e-6, rtol=0)
        assert (mine - other).abs().max() < 0.2 * 0.1


def test_a_layer_without_gradient_is_left_alone():
    model = Small()
    before = model.first.weight.clone()
    optimiser = make_optimiser(OptimiserSettings(kind="muon", learning_rate=1.0, weight_decay=0.1), model)
    model.third.weight.grad = torch.ones(3, 7)
    optimiser.param_groups[0]["lr"] = 0.1
    third = model.third.weight.clone()
    optimiser.step()
    assert torch.equal(model.first.weight, before)
    assert not torch.equal(model.third.weight, third)
