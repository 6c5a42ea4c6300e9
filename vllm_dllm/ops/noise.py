"""Random numbers as a pure function of (seed, counters, index): the same whatever the batch.

Every number comes from a key of its row (a request's seed, step, position) and an index (a
token id), through integer mixing that is the same on every device. So a draw depends neither
on the tile that it is computed in, nor on what else is in the batch, nor on how often a
generator was asked before. Two 32-bit rounds of `lowbias32` (Wellons, "Prospecting for Hash
Functions", 2018) mix the index; keys come from SplitMix64 (Steele et al., 2014).
"""

from __future__ import annotations

from enum import IntEnum

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Stream(IntEnum):
    """What a number is for; streams of one seed are independent."""

    CANVAS = 1  # the random canvas that denoising starts from
    CANDIDATE = 2  # the Gumbel noise of sampled tokens
    RENOISE = 3  # random tokens in place of rejected ones


def row_keys(seed: torch.Tensor, *counters: torch.Tensor | int) -> torch.Tensor:
    """Keys for rows, mixed from their seed and any number of counters.

    Args:
        seed: int64, any shape.
        counters: int64 tensors that broadcast with `seed`, or integers.

    Returns:
        int64 of the broadcast shape.
    """
    return more_keys(_splitmix(seed), *counters)


def more_keys(keys: torch.Tensor, *counters: torch.Tensor | int) -> torch.Tensor:
    """Keys from keys and further counters; shapes as in `row_keys`."""
    for counter in counters:
        # An odd multiplier spreads neighbouring counters over all bits; mixing does the rest. An
        # integer's product is taken on the host: making a tensor of it would be a copy.
        spread = counter * _GOLDEN if isinstance(counter, torch.Tensor) else _spread(counter)
        keys = _splitmix(keys ^ spread)
    return keys


def uniform_bits(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """32 random bits for each row and index.

    Args:
        keys: int64 ``[rows]``.
        index: int64 or int32, ``[n]`` or ``[rows, n]``, values in 0..2^31.

    Returns:
        int32 ``[rows, n]``, uniform over all 2^32 patterns.
    """
    low, high = keys.int()[:, None], (keys >> 32).int()[:, None]
    # An odd multiplier spreads neighbouring indices before the key joins them.
    bits = index.int() * _int32(0x9E3779B1) + low
    return _lowbias(_lowbias(bits) ^ high)


def uniform(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Float32 ``[rows, n]`` in the open interval (0, 1), fine-grained towards 0.

    Shapes as in `uniform_bits`.
    """
    bits = uniform_bits(keys, index)
    # As unsigned: float(bits) is in [-2^31, 2^31), so add what the sign took away.
    value = (bits.float() + torch.where(bits < 0, 2.0**32 + 0.5, 0.5)) * 2.0**-32
    return value.clamp_max_(1 - 2.0**-24)


def gumbel(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 ``[rows, n]``; shapes as in `uniform_bits`.

    The exponential variable comes from the fine-grained end of the uniform one, so that large
    Gumbel values, which decide the argmax, are not cut off at 24 bits.
    """
    exponential = torch.log1p_(uniform(keys, index).neg_()).neg_()
    return exponential.log_().neg_()


def uniform_tokens(keys: torch.Tensor, length: int, vocabulary: int) -> torch.Tensor:
    """Token ids drawn uniformly from ``range(vocabulary)``.

    Args:
        keys: int64 ``[rows]``.
        length: numbers per row.
        vocabulary: at most 2^31 ids.

    Returns:
        int64 ``[rows, length]``. The bias of the multiplication is below ``vocabulary / 2^32``.
    """
    bits = uniform_bits(keys, torch.arange(length, device=keys.device)).long() & 0xFFFFFFFF
    return (bits * vocabulary) >> 32


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _lowbias(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * _int32(0x7FEB352D)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _spread(counter: int) -> int:
    product = (counter * _GOLDEN) & ((1 << 64) - 1)
    return product - (1 << 64) if product >= 1 << 63 else product


def _int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
