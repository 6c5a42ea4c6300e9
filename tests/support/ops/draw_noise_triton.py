"""A kernel that writes what `noise.keyed_triton` computes, for tests."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_dllm.ops.noise.keyed_triton import gumbel, split_keys, uniform


@triton.jit
def noise_kernel(keys, first, out, COUNT: tl.constexpr):
    """Uniform and Gumbel noise ``[2, rows, COUNT]`` of ids from `first` on; grid (rows,)."""
    row, index = tl.program_id(0), tl.arange(0, COUNT)
    low, high = split_keys(tl.load(keys + row))
    at = out + row * COUNT + index
    tl.store(at, uniform(low, high, first + index))
    tl.store(at + tl.num_programs(0) * COUNT, gumbel(low, high, first + index))
