"""Chi-square tests of drawn numbers against a distribution."""

from __future__ import annotations

import torch

# The 99.9 % quantile of the normal distribution.
Z = 3.09


def limit(bins: int) -> float:
    """The 99.9 % quantile of chi-square with bins - 1 degrees of freedom (Wilson and Hilferty)."""
    n = bins - 1
    return n * (1 - 2 / (9 * n) + Z * (2 / (9 * n)) ** 0.5) ** 3


def chi_square(values: torch.Tensor, probability: torch.Tensor) -> float:
    """Of how often each value was drawn, against its probability."""
    counts = torch.bincount(values.flatten(), minlength=len(probability)).double()
    expected = probability.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())
