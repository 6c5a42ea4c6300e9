"""Counter-based random numbers: a pure function of a seed, counters and an index.

Every number comes from the key of its row (made of a request's seed, step and position) and an
index (a token id), by integer mixing that is the same on every device. A draw therefore depends
neither on the tile in which it is computed, nor on the rest of the batch, nor on how many numbers
were drawn before. Keys are mixed by SplitMix64 (Steele et al., 2014), the index by two 32-bit
rounds of `lowbias32` (Wellons, "Prospecting for Hash Functions", 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Stream(IntEnum):
    """The use of a random number. The streams of one seed are independent of each other."""

    CANVAS = 1  # the random tokens of a canvas that denoising starts from
    CANDIDATE = 2  # the Gumbel noise of sampled tokens
    RENOISE = 3  # the random tokens that replace rejected ones


def row_keys(seed: torch.Tensor, *counters: torch.Tensor | int) -> torch.Tensor:
    """Keys of rows, mixed from their seed and any number of counters.

    Args:
        seed: int64, any shape.
        counters: int64 tensors that broadcast with `seed`, or integers.

    Returns:
        int64 of the broadcast shape.
    """
    return more_keys(_splitmix(seed), *counters)


def more_keys(keys: torch.Tensor, *counters: torch.Tensor | int) -> torch.Tensor:
    """Mix keys with additional counters; shapes as in `row_keys`."""
    for counter in counters:
        # An odd multiplier spreads neighbouring counters over all bits; mixing does the rest. The
        # product of an integer is taken on the host, because a tensor would have to be copied.
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
    """`uniform_bits` for keys and indices whose shapes broadcast."""
    low, high = keys.int(), (keys >> 32).int()
    # An odd multiplier spreads neighbouring indices before the key joins them.
    bits = index.int() * _int32(0x9E3779B1) + low
    return _lowbias(_lowbias(bits) ^ high)


def uniform(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Float32 ``[rows, n]`` in the open interval (0, 1), fine-grained towards 0.

    Shapes as in `uniform_bits`.
    """
    bits = uniform_bits(keys, index)
    # The bits as an unsigned number: float(bits) is in [-2^31, 2^31), so negative ones gain 2^32.
    value = (bits.float() + torch.where(bits < 0, 2.0**32 + 0.5, 0.5)) * 2.0**-32
    return value.clamp_max_(1 - 2.0**-24)


def gumbel(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 ``[rows, n]``; shapes as in `uniform_bits`.

    The noise is -log(-log(1 - u)) of uniform numbers u, which are fine-grained near 0. So large
    Gumbel values, which decide the argmax, reach beyond the 16.6 that 24 random bits would allow.
    """
    exponential = torch.log1p_(uniform(keys, index).neg_()).neg_()
    return exponential.log_().neg_()


def uniform_tokens(keys: torch.Tensor, length: int, vocabulary: int) -> torch.Tensor:
    """Token ids drawn uniformly from ``range(vocabulary)``.

    Args:
        keys: int64 ``[rows]``.
        length: tokens per row.
        vocabulary: number of ids, at most 2^31.

    Returns:
        int64 ``[rows, length]``. Each id's probability has a relative error below
        ``vocabulary / 2^32``.
    """
    return _tokens(uniform_bits(keys, torch.arange(length, device=keys.device)), vocabulary)


def _tokens(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return ((bits.long() & 0xFFFFFFFF) * vocabulary) >> 32


@dataclass(frozen=True)
class StepNoise:
    """Everything that a denoise step draws for a model whose canvases start as random tokens.

    Attributes:
        keys: int64 ``[rows]``, keys of the candidates' Gumbel noise.
        renoise: int64 ``[rows]``, the tokens that replace rejected ones.
        fresh: int64 ``[rows]``, the tokens that the next canvas starts from, provided that this
            canvas has its full length L.
    """

    keys: torch.Tensor
    renoise: torch.Tensor
    fresh: torch.Tensor


class SlotCounters(Protocol):
    """Holds the counters of all slots; the attributes mean the same as in `Counters`."""

    seed: torch.Tensor
    start: torch.Tensor
    step: torch.Tensor
    length: int


@dataclass(frozen=True)
class Counters:
    """The inputs that determine a step's random numbers. A row is a position of a canvas.

    Attributes:
        seed: int64 ``[slots]``, each request's seed.
        start: int64 ``[slots]``, where each request's canvas begins in its sequence.
        step: int32 ``[slots]``, the denoise steps that each canvas has taken.
        slot: int64 ``[rows]``, each row's slot; the rows are whole canvases, one after another.
        length: L, positions of a canvas.
    """

    seed: torch.Tensor
    start: torch.Tensor
    step: torch.Tensor
    slot: torch.Tensor
    length: int

    @classmethod
    def of_canvases(cls, state: SlotCounters, slots: torch.Tensor) -> Counters:
        """The counters of all positions of some canvases.

        There is a row for each position rather than for each canvas, because a compiler would
        create a separate graph for a batch of one canvas.

        Args:
            state: the counters of all slots.
            slots: int64 ``[n]``, the canvases.
        """
        rows = slots.repeat_interleave(state.length)
        return cls(state.seed, state.start, state.step, rows, state.length)

    @property
    def position(self) -> torch.Tensor:
        """Each row's position in its canvas, int64 ``[rows]``."""
        return torch.arange(len(self.slot), device=self.slot.device) % self.length

    def keys(self) -> torch.Tensor:
        """Keys of each row's canvas in this step, int64 ``[rows]``."""
        return row_keys(self.seed[self.slot], self.start[self.slot], self.step[self.slot].long())


def candidate_keys(counters: Counters) -> torch.Tensor:
    """The keys with which rows draw their candidates, int64 ``[rows]``."""
    return more_keys(counters.keys(), counters.position, Stream.CANDIDATE)


def step_noise(counters: Counters, vocabulary: int) -> StepNoise:
    """All noise of a step, in one function, so that the compiler can turn it into one loop."""
    keys, position = counters.keys(), counters.position
    slot = counters.slot
    next_start = counters.start[slot] + counters.length
    next_canvas = row_keys(counters.seed[slot], next_start, Stream.CANVAS)
    return StepNoise(
        keys=more_keys(keys, position, Stream.CANDIDATE),
        renoise=_tokens(_bits(more_keys(keys, Stream.RENOISE), position), vocabulary),
        fresh=_tokens(_bits(next_canvas, position), vocabulary),
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
