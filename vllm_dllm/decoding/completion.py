"""When a canvas is finished, and how much of it belongs to the answer."""

from __future__ import annotations

import torch

from vllm_dllm.decoding.base import Canvas


def first_end(canvas: Canvas, end_tokens: torch.Tensor) -> torch.Tensor:
    """The position after the first decided end-of-sequence token, or L + 1; int64 ``[slots]``.

    ``end_tokens`` is int64 ``[slots, E]``, ids that end the request, padded with -1. End tokens at
    fixed positions do not count, because they belong to the prompt.
    """
    length = canvas.tokens.shape[1]
    is_end = (canvas.tokens[:, :, None] == end_tokens[:, None, :]).any(-1)  # [slots, L]
    is_end = is_end & ~(canvas.fixed | canvas.masked)
    behind = torch.arange(1, length + 1, device=is_end.device)
    return torch.where(is_end, behind, length + 1).amin(1)


def decided_prefix(canvas: Canvas) -> torch.Tensor:
    """The number of positions before the first masked one; int64 ``[slots]`` in ``0..L``."""
    length = canvas.masked.shape[1]
    # Compiled, a reduction shares a kernel with what surrounds it; a running sum does not.
    return torch.where(
        canvas.masked, torch.arange(length, device=canvas.masked.device), length
    ).amin(1)


def emitted_length(canvas: Canvas, reach: torch.Tensor, early: bool = True) -> torch.Tensor:
    """The length of the prefix that may leave, int64 ``[slots]``; 0 while the canvas must go on.

    A canvas without masked positions leaves whole. With `early`, a canvas whose positions up to
    `reach` are all decided leaves up to there: nothing after that is ever shown, so steps to decide
    it would be wasted (``eos_early_stop`` in LLaDA2's ``generate``). This is valid only for
    algorithms that never change a decided position. `reach` (int64 ``[slots]``, at least 1) is the
    smaller of `first_end` and the number of positions that the request may output, including those
    of the tail.
    """
    length = canvas.tokens.shape[1]
    prefix = decided_prefix(canvas)
    if not early:
        return torch.where(prefix == length, length, 0)
    answer = reach.clamp_max(length)
    return answer.masked_fill(answer > prefix, 0)
