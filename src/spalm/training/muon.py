"""Muon (Jordan et al., 2024): updates of matrices whose singular values are all about one.

    M <- momentum M + G                        G: the gradient
    W <- W - rate 0.2 sqrt(max(m, n)) orthogonal(G + momentum M)

The factor gives an update of m x n the size that Adam's has (Liu et al., 2025), so both take the same learning rate.
torch.optim.Muon orthogonalises in bfloat16, which most CPUs emulate: here that is done only where the network is
trained in it.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spalm.compute import map_in_threads

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the odd polynomial aX + b(XX')X + c(XX')^2 X that moves singular values from (0, 1] towards one."""
_SIZE_OF_ADAM = 0.2
"""Root mean square of the elements of an update of Adam, as observed."""


class MuonOrAdam(torch.optim.AdamW):
    """Muon for some matrices, AdamW for all other parameters, in one optimiser."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: Iterable[int],
        *,
        betas: tuple[float, float],
        momentum: float,
        orthogonalise: Callable[[Tensor], Tensor],
        threads: int = 1,
    ):
        """`matrices` holds the `id` of each parameter that Muon updates; `threads` share them."""
        super().__init__(groups, lr=0.0, betas=betas, fused=True)
        self._matrices, self._momentum = frozenset(matrices), momentum
        self._orthogonalise, self._threads = orthogonalise, threads

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            own = [each for each in group["params"] if id(each) in self._matrices and each.grad is not None]
            update = partial(self._update, rate=group["lr"], weight_decay=group["weight_decay"])
            map_in_threads(update, own, count=self._threads)
        super().step()

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, rate: float, weight_decay: float) -> None:
        """Updates a matrix, and removes its gradient, so that Adam leaves it alone."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:  # a number of steps too, because Adam expects one in every state that it loads
            state.update(step=torch.zeros(()), momentum=torch.zeros_like(parameter))
        state["step"] += 1
        moment = state["momentum"]
        moment.mul_(self._momentum).add_(gradient)
        gradient.add_(moment, alpha=self._momentum)
        parameter.grad = None
        update = self._orthogonalise(gradient)
        scale = rate * _SIZE_OF_ADAM * math.sqrt(max(gradient.shape))
        parameter.mul_(1 - rate * weight_decay).add_(update, alpha=-scale)


def orthogonalised(
    matrix: Float[Tensor, "rows columns"], iterations: int, *, bf16: bool = False
) -> Float[Tensor, "rows columns"]:
    """Returns U V' for a matrix U S V', with singular values of roughly one (0.7 to 1.2 after five iterations)."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).contiguous()
    x = x / x.norm().clamp(min=1e-7)
    x = x.bfloat16() if bf16 else x
    for _ in range(iterations):
        gram = x @ x.T
        polynomial = (gram @ gram).mul_(_C).add_(gram, alpha=_B)
        x = (polynomial @ x).add_(x, alpha=_A)
    return x.T if tall else x
