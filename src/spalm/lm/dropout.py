"""Dropout whose masks are cheap to draw on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spalm.training import RandomLayer


class Dropout(RandomLayer):
    """Dropout whose rate is rounded to a multiple of 1/256.

    On a CPU torch draws one random number for every element, which costs more than the layers between. Here each random
    64-bit number decides eight elements, a byte each. The scale is that of the rounded rate, so the mean is exact.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self._kept = max(1, 256 - round(rate * 256))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self._kept == 256:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=self.generator)
        bytes_ = words.view(torch.uint8)[: x.numel()].view(x.shape)
        return x * ((bytes_ < self._kept) * (256 / self._kept))

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
