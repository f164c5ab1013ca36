"""Muon (Jordan et al., 2024): updates of matrices whose singular values are all about one.

    M <- momentum M + G                        G: the gradient
    W <- W - rate 0.2 sqrt(max(m, n)) orthogonal(G + momentum M)

The factor gives an update of m x n the size that Adam's has (Liu et al., 2025), so both take the same learning rate.
torch.optim.Muon orthogonalises in bfloat16, which most CPUs emulate: here it is done in the gradient's precision, for
all matrices of one shape at a time.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
        iterations: int,
    ):
        """`matrices` holds the `id` of each parameter that Muon updates."""
        super().__init__(groups, lr=0.0, betas=betas, fused=True)
        self._matrices, self._momentum, self._iterations = frozenset(matrices), momentum, iterations

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if id(parameter) in self._matrices and parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for alike in by_shape.values():
                self._update(alike, group["lr"], group["weight_decay"])
        super().step()

    def _update(self, matrices: list[nn.Parameter], rate: float, weight_decay: float) -> None:
        """Updates matrices of one shape, and removes their gradients, so that Adam leaves them alone."""
        gradients = torch.stack([parameter.grad for parameter in matrices if parameter.grad is not None])
        for parameter, gradient in zip(matrices, gradients):
            state = self.state[parameter]
            if not state:  # a number of steps too, because Adam expects one in every state that it loads
                state.update(step=torch.zeros(()), momentum=torch.zeros_like(parameter))
            state["step"] += 1
            moment = state["momentum"]
            moment.mul_(self._momentum).add_(gradient)
            gradient.add_(moment, alpha=self._momentum)
            parameter.grad = None
        updates = orthogonalised(gradients, self._iterations)
        scale = rate * _SIZE_OF_ADAM * math.sqrt(max(gradients.shape[1:]))
        for parameter, update in zip(matrices, updates):
            parameter.mul_(1 - rate * weight_decay).add_(update, alpha=-scale)


def orthogonalised(matrices: Float[Tensor, "n rows columns"], iterations: int) -> Float[Tensor, "n rows columns"]:
    """Returns U V' for each matrix U S V', with singular values of roughly one (0.7 to 1.2 after five iterations)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(iterations):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.transpose(1, 2) if tall else x
