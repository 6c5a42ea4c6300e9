"""Counter-based random numbers inside Triton kernels: functions of a row's key and a token id.

The caller makes a row's key of a seed and any counters. The id is mixed with its halves by two
32-bit rounds of `lowbias32` (Wellons, "Prospecting for Hash Functions", 2018). The tests, and
`vllm_dllm.ops.noise.keyed`, have the same in PyTorch, with which the bits agree, and Gumbel noise
up to rounding.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_key(key):  # type: ignore[no-untyped-def]
    """The low and the high half of int64 keys, each uint32."""
    return (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _lowbias(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(low, high, index):  # type: ignore[no-untyped-def]
    """Float32 in (0, 1) of the keys' halves and an int32 index; shapes broadcast."""
    # In a product with a signed number, a constant of more than 31 bits would become int64.
    bits = index.to(tl.uint32) * 0x9E3779B1 + low
    bits = _lowbias(_lowbias(bits) ^ high).to(tl.int32, bitcast=True)
    # 2^32 + 0.5 is 2^32 in float32, so PyTorch adds the same.
    value = (bits.to(tl.float32) + tl.where(bits < 0, 4294967296.0, 0.5)) * 2.3283064365386963e-10
    return tl.minimum(value, 0.99999994)


@triton.jit
def gumbel(low, high, index):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise of the same, float32.

    Triton has no log1p. For u below 1/8, -log(1 - u) is summed as a series of eight terms, which
    leaves a relative error of 2^-27, so that small u keep all their bits. For larger u, 1 - u is
    off by 2^-25 at most, which is less than 5e-7 of the result. If the logarithm is right to one
    unit in the last place, the noise is within 1e-6 + 2e-7 * |noise| of the exact function of the
    same u.
    """
    u = uniform(low, high, index)
    series = 1 / 7 + u * (1 / 8)
    series = 1 / 6 + u * series
    series = 1 / 5 + u * series
    series = 1 / 4 + u * series
    series = 1 / 3 + u * series
    series = u + u * u * (1 / 2 + u * series)
    return -tl.log(tl.where(u < 0.125, series, -tl.log(1.0 - u)))
