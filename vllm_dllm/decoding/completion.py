"""When is a canvas finished, and how much of it is the answer?"""

from __future__ import annotations

import torch

from vllm_dllm.decoding.base import Canvas


def emitted_length(canvas: Canvas, end_tokens: torch.Tensor) -> torch.Tensor:
    """Length of the canvas prefix that may leave, or 0 while the canvas must go on.

    A canvas without masked positions leaves whole. One whose positions up to its first
    end-of-sequence token are all decided leaves up to that token: nothing behind it is
    ever shown, so waiting for it would be wasted steps (``eos_early_stop`` in LLaDA2's
    ``generate``). Fixed positions are the prompt's: an end token there ends nothing.

    Args:
        canvas: tensors of shape ``[slots, L]``.
        end_tokens: int64 ``[slots, E]``, ids that end the request, padded with -1. A slot
            whose row is all -1 never leaves early.

    Returns:
        int64 ``[slots]`` in ``0..L``.
    """
    length = canvas.tokens.shape[1]
    is_end = (canvas.tokens[:, :, None] == end_tokens[:, None, :]).any(-1)  # [slots, L]
    undecided_so_far = canvas.masked.cumsum(1)  # [slots, L], counts this position too
    ends = is_end & ~canvas.fixed & (undecided_so_far == 0)
    # Position behind the first end; length + 1 where there is none.
    behind = torch.where(ends, torch.arange(1, length + 1, device=ends.device), length + 1)
    first = behind.amin(1)
    early = torch.where(first <= length, first, 0)
    return torch.where(undecided_so_far[:, -1] == 0, length, early)
