"""A kernel that writes the noise of canvas-grammar's kernels and of ours, for tests."""

from __future__ import annotations

import triton
import triton.language as tl
from canvas_grammar.decoding.noise_triton import gumbel, split_key, uniform


@triton.jit
def noise_kernel(keys, first, out, COUNT: tl.constexpr):
    """Uniform and Gumbel noise ``[2, rows, COUNT]`` of ids from `first` on; grid (rows,)."""
    row, index = tl.program_id(0), tl.arange(0, COUNT)
    low, high = split_key(tl.load(keys + row))
    at = out + row * COUNT + index
    tl.store(at, uniform(low, high, first + index))
    tl.store(at + tl.num_programs(0) * COUNT, gumbel(low, high, first + index))
