"""Relative attention against loops written from the formula of transformer-XL."""

import math

import pytest
import torch

from spalm.lm import relative_attention as relative
from spalm.lm.relative_attention import attend, fused, sinusoids

BATCH, TIME, MEMORY, HEADS, SIZE = 2, 5, 3, 2, 7


def loops(content, position, keys_values, distances):
    """score(i, j) = content_i . k_j + position_i . r_(M+i-j), one number at a time."""
    batch, time, heads, _ = content.shape
    keys, values = keys_values.unbind(2)
    span = keys.shape[1]
    output = torch.zeros_like(content)
    for b in range(batch):
        for h in range(heads):
            for i in range(time):
                scores = []
                for j in range(span - time + i + 1):
                    distance = span - time + i - j
                    r = distances[span - 1 - distance, h]
                    scores.append(content[b, i, h] @ keys[b, j, h] + position[b, i, h] @ r)
                weights = torch.softmax(torch.stack(scores), 0)
                output = output.index_put(
                    (torch.tensor(b), torch.tensor(i), torch.tensor(h)),
                    sum(weight * values[b, j, h] for j, weight in enumerate(weights)),
                )
    return output


def inputs(time: int, memory: int):
    span = memory + time
    shapes = [(BATCH, time), (BATCH, time), (BATCH, span, 2), (span,)]
    return [torch.randn(*shape, HEADS, SIZE, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("form", "block"), [(fused, 128), (attend, 1), (attend, 2), (attend, 128)])
@pytest.mark.parametrize(("time", "memory"), [(TIME, MEMORY), (TIME, 0), (1, MEMORY), (1, 0)])
def test_outputs_and_gradients_equal_the_loops(form, block, time, memory, monkeypatch):
    monkeypatch.setattr(relative, "BLOCK", block)
    given = inputs(time, memory)
    upstream = torch.randn(BATCH, time, HEADS, SIZE, dtype=torch.float64)
    expected, found = loops(*given), form(*given[:3], distances=given[3])
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, given, upstream), torch.autograd.grad(expected, given, upstream)
    ):
        torch.testing.assert_close(mine, theirs)


def test_no_query_sees_a_later_key():
    content, position, keys_values, distances = inputs(TIME, MEMORY)
    before = attend(content, position, keys_values, distances=distances)
    keys_values.data[:, -1] += 100.0
    after = attend(content, position, keys_values, distances=distances)
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=0)
    assert not torch.allclose(before[:, -1], after[:, -1])


@pytest.mark.parametrize("block", [2, 128])
def test_in_bfloat16_it_is_nearly_the_same(block, monkeypatch):
    monkeypatch.setattr(relative, "BLOCK", block)
    given = [each.detach().float().requires_grad_() for each in inputs(TIME, MEMORY)]
    upstream = torch.randn(BATCH, TIME, HEADS, SIZE)
    expected = attend(*given[:3], distances=given[3])
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(*given[:3], distances=given[3])
    assert found.dtype == torch.bfloat16
    gradients = torch.autograd.grad(found, given, upstream.bfloat16()), torch.autograd.grad(expected, given, upstream)
    for mine, theirs in [(found, expected), *zip(*gradients)]:
        assert 0 < (mine - theirs).norm() < 0.02 * theirs.norm()


def test_sinusoids_are_those_of_falling_distance():
    encoding = sinusoids(4, 6, torch.zeros(1))
    for row, distance in enumerate([3, 2, 1, 0]):
        for pair in range(3):
            angle = distance / 10_000 ** (2 * pair / 6)
            assert encoding[row, pair].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert encoding[row, 3 + pair].item() == pytest.approx(math.cos(angle), abs=1e-6)
