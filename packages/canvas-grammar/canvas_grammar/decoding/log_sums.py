"""Compute logarithms of sums of exponentials.

They are computed to base 2, because on a CPU `exp2` is several times as fast as `exp`.

Each sum has the largest of its terms as its origin, so only terms underflow that do not matter next
to another one.
"""

from __future__ import annotations

import torch

LOG2_E = 1.4426950408889634
# Replaces -inf as the origin of a sum, which would give NaN.
LOWEST = -1e38


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp over the last dimension of float32 ``[..., k]``, float32 ``[...]``."""
    if x.device.type != "cpu":
        return x.logsumexp(-1)
    origin = x.amax(-1).clamp_min_(LOWEST)
    return (x - origin[..., None]).mul_(LOG2_E).exp2_().sum(-1).log_().add_(origin)
