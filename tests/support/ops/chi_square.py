"""Chi-square tests of drawn numbers against a distribution."""

from __future__ import annotations

import torch

# The 99.9 % quantile of the normal distribution.
Z = 3.09


def limit(bins: int) -> float:
    """The 99.9 % quantile of chi-square with bins - 1 degrees of freedom (Wilson and Hilferty)."""
    n = bins - 1
    return n * (1 - 2 / (9 * n) + Z * (2 / (9 * n)) ** 0.5) ** 3


def follows(values: torch.Tensor, probability: torch.Tensor) -> bool:
    """Whether numbers may have been drawn from a distribution, by a chi-square test.

    Rare numbers count together, because the test wants some of every class.
    """
    expected = probability.double() * values.numel()
    rare = expected < 10
    classes = torch.where(rare, 0, torch.cumsum(~rare, 0) - int(not rare.any()))
    bins = int(classes.max()) + 1
    merged = torch.zeros(bins).double().index_add_(0, classes, expected)
    counts = torch.bincount(classes[values.flatten()], minlength=bins).double()
    return float(((counts - merged) ** 2 / merged).sum()) < limit(bins)
