"""Muon: momentum whose matrices are orthogonalised before they are applied.

On tiny-diffusiongemma it needs a fraction of AdamW's steps. ``torch.optim.Muon`` takes
two-dimensional parameters one at a time; experts are stacks of matrices, and many small
matrices are faster together, so this one batches all matrices of one shape.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the
scale, which makes a step as long as AdamW's, from Liu et al., "Muon is Scalable for LLM
Training" (arXiv 2502.16982).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of the odd quintic that drives singular values to 1
ITERATIONS = 5
ADAMW_STEP = 0.2  # root mean square of the entries of a typical AdamW step


class Muon(torch.optim.Optimizer):
    """For the weights of linear layers: matrices, or stacks of them ``[..., out, in]``."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One Nesterov step; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            same_shape = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    same_shape[param.shape[-2:]].append(param)
            for params in same_shape.values():
                self._step(params, group)

    def _step(self, params: list[torch.Tensor], group: dict[str, float]) -> None:
        updates = []
        for param in params:
            average = self.state[param].setdefault("momentum", torch.zeros_like(param))
            average.lerp_(param.grad, 1 - group["momentum"])
            updates.append(param.grad.lerp(average, group["momentum"]))
        rows, columns = params[0].shape[-2:]
        stacked = torch.cat([update.reshape(-1, rows, columns) for update in updates])
        steps = orthogonal(stacked) * (group["lr"] * ADAMW_STEP * max(rows, columns) ** 0.5)
        counts = [param.numel() // (rows * columns) for param in params]
        for param, step in zip(params, steps.split(counts), strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step.view_as(param))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest (semi-)orthogonal matrices of a float32 stack ``[n, out, in]``.

    Newton and Schulz's iteration in bfloat16: all singular values end between 0.7 and 1.2.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()
