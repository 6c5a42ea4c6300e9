"""Which keys a query sees: a rule of two numbers for each request, and pictures of the rules.

    python -m vllm_dllm.ops.attention.masks block_causal

Positions are those in the request's sequence, ``q`` of the query and ``k`` of the key. Keys exist
only in ``0 <= k < span.end``.
"""

from __future__ import annotations

import argparse
import sys
from enum import IntEnum
from typing import Any, NamedTuple

import torch

# A block longer than any sequence: every query in it sees to the sequence's end.
WHOLE = 1 << 30


class QuerySpan(NamedTuple):
    """A request's query: positions ``start <= q < end`` of a sequence of ``end`` tokens."""

    start: int
    end: int


class WindowRule(IntEnum):
    """The left edge of a sliding window of width W; see the setting ``dllm.window``."""

    NONE = 0
    # |q - k| < W, as in vLLM's DiffusionGemma. With causal blocks this is the usual window: the
    # right half is hidden anyway.
    SYMMETRIC = 1
    # From the W - 1 tokens before the query's first token on, for every token of the query. In
    # Hugging Face's transformers, DiffusionGemma masks a canvas this way while denoising it.
    REFERENCE = 2


class MaskRule(NamedTuple):
    """A mask as the numbers that a kernel takes: ints, or int32 tensors ``[requests]``."""

    # The block length; a query sees everything up to the end of its block. 1 is causal, L
    # block-causal, `WHOLE` bidirectional.
    block: Any
    window: Any  # a `WindowRule`; the window's width belongs to the layer, not to the request


def interval(
    q: torch.Tensor, span: QuerySpan, rule: MaskRule, window_width: int
) -> tuple[torch.Tensor, ...]:
    """The keys ``first <= k < end`` that queries ``q`` see by a rule: what the kernel computes.

    Both edges grow with q, so the edges of the first and the last query of a run say which keys any
    of them sees, and which all of them see. The rule is one of ints, and `window_width` is that of
    the layer, or 0. ``first`` and ``end`` have q's shape.
    """
    first = torch.zeros_like(q)
    end = ((q // rule.block + 1) * rule.block).clamp(max=span.end)
    if window_width and rule.window == WindowRule.SYMMETRIC:
        first, end = (q - window_width + 1).clamp(min=0), end.minimum(q + window_width)
    elif window_width and rule.window == WindowRule.REFERENCE:
        first = torch.full_like(q, max(0, span.start - window_width + 1))
    return first, end


def visible(
    span: QuerySpan, rule: MaskRule, window_width: int = 0, device: torch.device | None = None
) -> torch.Tensor:
    """The same as a matrix, bool ``[queries, keys]``."""
    q = torch.arange(*span, device=device)[:, None]
    first, end = interval(q, span, rule, window_width)
    k = torch.arange(span.end, device=device)
    return (first <= k) & (k < end)


# What `python -m vllm_dllm.ops.attention.masks NAME` draws: a rule and a window's width.
PICTURES: dict[str, tuple[QuerySpan, MaskRule, int]] = {
    "causal": (QuerySpan(0, 12), MaskRule(1, WindowRule.NONE), 0),
    "block_causal(4)": (QuerySpan(0, 14), MaskRule(4, WindowRule.NONE), 0),
    "bidirectional": (QuerySpan(8, 16), MaskRule(WHOLE, WindowRule.NONE), 0),
    "window_causal(5)": (QuerySpan(0, 12), MaskRule(1, WindowRule.SYMMETRIC), 5),
    "window_symmetric(5)": (QuerySpan(8, 16), MaskRule(WHOLE, WindowRule.SYMMETRIC), 5),
    "window_reference(5)": (QuerySpan(8, 16), MaskRule(WHOLE, WindowRule.REFERENCE), 5),
}


def draw(name: str) -> str:
    """Draw queries downwards and keys rightwards, with ``|`` before the query's first token."""
    span, rule, width = PICTURES[name]
    lines = [f"{name}, queries {span.start} to {span.end - 1}"]
    for q, row in enumerate(visible(span, rule, width).tolist(), span.start):
        keys = "".join("#" if seen else "." for seen in row)
        lines.append(f"{q:4} {keys[: span.start]}|{keys[span.start :]}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the picture of one mask, or of all."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_dllm.ops.attention.masks", description=main.__doc__
    )
    by_name = {name.partition("(")[0]: name for name in PICTURES}
    parser.add_argument("name", nargs="?", choices=tuple(by_name), help="all without one")
    name = parser.parse_args(arguments).name
    print("\n\n".join(map(draw, [by_name[name]] if name else PICTURES)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
