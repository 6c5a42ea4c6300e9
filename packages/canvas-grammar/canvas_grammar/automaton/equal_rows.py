"""Which rows of a table are equal: found by hashing, and verified by comparison."""

from __future__ import annotations

import numpy as np


def equal_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups of equal rows, in the order of their first rows.

    Args:
        rows: integers ``[rows, width]``.

    Returns:
        The first row of each group, int64 ``[groups]``, and the group of each row, int64
        ``[rows]``.
    """
    weights = np.random.default_rng(0).integers(1, 1 << 62, size=rows.shape[1], dtype=np.int64)
    keys = rows.astype(np.int64) @ weights
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    if not np.array_equal(rows, rows[first[group]]):
        _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        group = group.reshape(-1)
    order = np.argsort(first, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[group]
