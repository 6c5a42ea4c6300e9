"""Counter-based random numbers: a pure function of a key and an index.

Every number comes from the key of its row (made of a seed and any counters, such as a step and a
position) and an index (a token id), by integer mixing that is the same on every device. A draw
therefore depends neither on the rest of the batch nor on how many numbers were drawn before. Keys
are mixed by SplitMix64 (Steele et al., 2014), the index by two 32-bit rounds of `lowbias32`
(Wellons, "Prospecting for Hash Functions", 2018).
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def row_keys(seed: torch.Tensor, *counters: torch.Tensor | int) -> torch.Tensor:
    """Keys of rows, mixed from their seed and any number of counters.

    Args:
        seed: int64, any shape.
        counters: int64 tensors that broadcast with `seed`, or integers.

    Returns:
        int64 of the broadcast shape.
    """
    keys = _splitmix(seed)
    for counter in counters:
        spread = torch.as_tensor(counter, dtype=torch.int64, device=seed.device) * _GOLDEN
        keys = _splitmix(keys ^ spread)
    return keys


def gumbel(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each row and index.

    The noise is -log(-log(1 - u)) of uniform numbers u, which are fine-grained near 0. So large
    Gumbel values, which decide the argmax, reach beyond the 16.6 that 24 random bits would allow.

    Args:
        keys: int64 ``[rows]``.
        index: int64 or int32, ``[n]`` or ``[rows, n]``, values in 0..2^31.

    Returns:
        float32 ``[rows, n]``.
    """
    exponential = torch.log1p_(_uniform(keys, index).neg_()).neg_()
    return exponential.log_().neg_()


def _uniform(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Float32 ``[rows, n]`` in the open interval (0, 1), fine-grained towards 0."""
    low, high = keys[:, None].int(), (keys[:, None] >> 32).int()
    # An odd multiplier spreads neighbouring indices before the key joins them.
    bits = _lowbias(_lowbias(index.int() * _int32(0x9E3779B1) + low) ^ high)
    # The bits as an unsigned number: float(bits) is in [-2^31, 2^31), so negative ones gain 2^32.
    value = (bits.float() + torch.where(bits < 0, 2.0**32 + 0.5, 0.5)) * 2.0**-32
    return value.clamp_max_(1 - 2.0**-24)


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _lowbias(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * _int32(0x7FEB352D)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
