"""Random numbers as a pure function of (seed, counters, index): the same whatever the batch.

Every number comes from a key of its row (a request's seed, step, position) and an index (a
token id), through integer mixing that is the same on every device. So a draw depends neither
on the tile that it is computed in, nor on what else is in the batch, nor on how often a
generator was asked before. Two 32-bit rounds of `lowbias32` (Wellons, "Prospecting for Hash
Functions", 2018) mix the index; keys come from SplitMix64 (Steele et al., 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
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
    return _bits(keys[:, None], index)


def _bits(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of keys and indices whose shapes broadcast."""
    low, high = keys.int(), (keys >> 32).int()
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
    return _tokens(uniform_bits(keys, torch.arange(length, device=keys.device)), vocabulary)


def _tokens(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return ((bits.long() & 0xFFFFFFFF) * vocabulary) >> 32


@dataclass(frozen=True)
class StepNoise:
    """All that a denoise step of a model of uniform noise draws.

    Attributes:
        keys: int64 ``[rows]``, keys of the candidates' Gumbel noise.
        renoise: int64 ``[rows]``, tokens in place of rejected ones.
        fresh: int64 ``[rows]``, tokens of the canvas behind this one, if this one is L wide.
    """

    keys: torch.Tensor
    renoise: torch.Tensor
    fresh: torch.Tensor


@dataclass(frozen=True)
class Counters:
    """What the numbers of a step are drawn from; a row is a position of a canvas.

    Attributes:
        seed, start, step: int64, int64 and int32 ``[slots]``: a request's seed, where its canvas
            begins, and the denoise steps that the canvas has taken.
        slot: int64 ``[rows]``, whole canvases one behind the other.
        length: L.
    """

    seed: torch.Tensor
    start: torch.Tensor
    step: torch.Tensor
    slot: torch.Tensor
    length: int

    @classmethod
    def of_canvases(
        cls,
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        length: int,
    ) -> Counters:
        """The counters of all positions of some canvases.

        There is a row for each position rather than for each canvas: a compiler would make a
        graph of its own for a batch of one canvas.

        Args:
            state: seed, start and step of all slots.
            slots: int64 ``[n]``, the canvases.
            length: L.
        """
        return cls(*state, slots.repeat_interleave(length), length)

    @property
    def position(self) -> torch.Tensor:
        """Of the rows in their canvas, int64 ``[rows]``."""
        return torch.arange(len(self.slot), device=self.slot.device) % self.length

    def keys(self) -> torch.Tensor:
        """Of the rows' canvases in this step, int64 ``[rows]``."""
        return row_keys(self.seed[self.slot], self.start[self.slot], self.step[self.slot].long())


def candidate_keys(of: Counters) -> torch.Tensor:
    """What rows draw their candidates with, int64 ``[rows]``."""
    return more_keys(of.keys(), of.position, Stream.CANDIDATE)


def step_noise(of: Counters, vocabulary: int) -> StepNoise:
    """All noise of a step, in one function that a compiler can make one loop of."""
    keys, position = of.keys(), of.position
    behind = row_keys(of.seed[of.slot], of.start[of.slot] + of.length, Stream.CANVAS)
    return StepNoise(
        keys=more_keys(keys, position, Stream.CANDIDATE),
        renoise=_tokens(_bits(more_keys(keys, Stream.RENOISE), position), vocabulary),
        fresh=_tokens(_bits(behind, position), vocabulary),
    )


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
