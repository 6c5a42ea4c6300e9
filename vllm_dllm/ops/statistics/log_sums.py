"""Logarithms of sums of exponentials.

They are computed to base 2, because on a CPU `exp2` is several times as fast as `exp`.

Each sum is relative to its largest term, so only terms that are negligible next to it underflow.
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
