"""Counter-based random numbers: a pure function of a seed, counters and an index.

Every number comes from the key of its row (made of a request's seed, step and position) and an
index (a token id), by integer mixing that is the same on every device. A draw therefore depends
neither on tiles, nor on the rest of the batch, nor on how many numbers were drawn before. Keys are
mixed by SplitMix64 (Steele et al., 2014), the index by two 32-bit rounds of `lowbias32` (Wellons,
"Prospecting for Hash Functions", 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Stream(IntEnum):
    """The use of a random number. The streams of one seed are independent of each other."""

    CANVAS = 1  # the random tokens of a canvas that denoising starts from
    CANDIDATE = 2  # the Gumbel noise of sampled tokens
    RENOISE = 3  # the random tokens that replace rejected ones


def row_keys(seed: torch.Tensor, *counters: torch.Tensor | int) -> torch.Tensor:
    """Keys of rows, int64, mixed from their seed (int64, any shape) and any number of counters.

    Counters are int64 tensors that broadcast with `seed`, or integers.
    """
    return more_keys(_splitmix(seed), *counters)


def more_keys(keys: torch.Tensor, *counters: torch.Tensor | int) -> torch.Tensor:
    """Mix keys with additional counters; shapes as in `row_keys`."""
    for counter in counters:
        # An odd multiplier spreads neighbouring counters over all bits; mixing does the rest. The
        # product of an integer is taken on the host, because a tensor would have to be copied.
        spread = (
            counter * _GOLDEN
            if isinstance(counter, torch.Tensor)
            else _signed(counter * _GOLDEN, 64)
        )
        keys = _splitmix(keys ^ spread)
    return keys


def uniform_bits(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """32 random bits for each row and index, int32 ``[rows, n]``.

    `keys` is int64 ``[rows]``; `index` is int64 or int32 of 0..2^31, ``[n]`` or ``[rows, n]``.
    """
    low, high = keys[:, None].int(), (keys[:, None] >> 32).int()
    # An odd multiplier spreads neighbouring indices before the key joins them.
    bits = index.int() * _signed(0x9E3779B1) + low
    return _lowbias(_lowbias(bits) ^ high)


def uniform(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Float32 in the open interval (0, 1), fine-grained towards 0; shapes as in `uniform_bits`."""
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


def uniform_tokens(keys: torch.Tensor, index: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Token ids drawn uniformly from ``range(vocabulary)``, int64 ``[rows, n]``.

    Keys and indices are those of `uniform_bits`. There are at most 2^31 ids. The probability of
    each has a relative error below ``vocabulary / 2^32``.
    """
    return ((uniform_bits(keys, index).long() & 0xFFFFFFFF) * vocabulary) >> 32


@dataclass(frozen=True)
class StepNoise:
    """What a denoise step draws for a model whose canvases start as random tokens, ``[rows]``."""

    keys: torch.Tensor  # int64, keys of the candidates' Gumbel noise
    renoise: torch.Tensor  # int64, the tokens that replace rejected ones
    fresh: torch.Tensor  # int64, those that the next canvas starts from, if this one has length L


@dataclass(frozen=True)
class Counters:
    """The inputs that determine a step's random numbers. A row is a position of a canvas."""

    seed: torch.Tensor  # int64 [slots], each request's seed
    start: torch.Tensor  # int64 [slots], where each request's canvas begins in its sequence
    step: torch.Tensor  # int32 [slots], the denoise steps that each canvas has taken
    slot: torch.Tensor  # int64 [rows], each row's slot; the rows are whole canvases
    length: int  # L, positions of a canvas

    @classmethod
    def of_canvases(cls, state: Any, slots: torch.Tensor) -> Counters:
        """The counters of all positions of the canvases in ``slots``, int64 ``[n]``.

        `state` has those of all slots, by the names used here. There is a row for each position,
        because a compiler would create a separate graph for a batch of one canvas.
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
    keys, position, slot = counters.keys(), counters.position, counters.slot
    next_start = counters.start[slot] + counters.length
    next_canvas = row_keys(counters.seed[slot], next_start, Stream.CANVAS)
    renoise = more_keys(keys, Stream.RENOISE)
    return StepNoise(
        keys=more_keys(keys, position, Stream.CANDIDATE),
        renoise=uniform_tokens(renoise, position[:, None], vocabulary)[:, 0],
        fresh=uniform_tokens(next_canvas, position[:, None], vocabulary)[:, 0],
    )


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _lowbias(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x7FEB352D)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(value: int, bits: int = 32) -> int:
    """The lowest bits of a number, as those of a signed integer."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
