import pytest
import torch

from spalm.lm.dropout import Dropout


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
def test_share_and_mean(rate):
    x = torch.ones(1000, 1003)
    dropped = Dropout(rate)(x)
    assert (dropped == 0).float().mean().item() == pytest.approx(round(rate * 256) / 256, abs=0.002)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.003)
    # Neighbours share a random word: they must not share their fate.
    together = ((dropped[:, 1:] == 0) & (dropped[:, :-1] == 0)).float().mean().item()
    assert together == pytest.approx(rate**2, abs=0.01)


def test_none_at_test_time_or_at_rate_zero():
    x = torch.randn(3, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
