"""Which keys a query sees: one small predicate per mask, and a picture of it.

    python -m vllm_dllm.ops.attention.masks block_causal

A predicate takes positions in the request's sequence, ``q`` of the query and ``k`` of the key,
and the request's `QuerySpan`. Positions are ints, or tensors that broadcast. Keys exist only in
``0 <= k < span.end``.

A kernel takes a `MaskRule` instead: a block length and a window rule per request, which determine
the keys of every query as one interval (`interval`). `tests/ops/test_masks.py` proves that each
rule means the same as its mask's predicate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

# A block longer than any sequence: every query in it sees to the sequence's end.
WHOLE = 1 << 30


class QuerySpan(NamedTuple):
    """A request's query: positions ``start <= q < end`` of a sequence of ``end`` tokens."""

    start: Any
    end: Any


# (q, k, span) to bool; ints or int tensors that broadcast.
Predicate = Callable[[Any, Any, QuerySpan], Any]


class WindowRule(IntEnum):
    """The left edge of a sliding window of width W; see the setting ``dllm.window``."""

    NONE = 0
    # |q - k| < W. With causal blocks this is the usual window: the right half is hidden anyway.
    SYMMETRIC = 1
    # From the W - 1 tokens before the query's first token on, for every token of the query.
    REFERENCE = 2


class MaskRule(NamedTuple):
    """A mask as the numbers that a kernel takes: ints, or int32 tensors ``[requests]``."""

    # The block length; a query sees everything up to the end of its block. 1 is causal, L
    # block-causal, `WHOLE` bidirectional.
    block: Any
    window: Any  # a `WindowRule`; the window's width belongs to the layer, not to the request


@dataclass(frozen=True)
class Mask:
    """A mask: its predicate, and the equivalent rule for a kernel."""

    name: str  # the name as written in code, e.g. ``block_causal(32)``.
    sees: Predicate  # whether query q sees key k
    rule: MaskRule  # the equivalent rule for a kernel
    window_width: int = 0  # W of its window, or 0 without one

    def dense(self, span: QuerySpan, device: torch.device | None = None) -> torch.Tensor:
        """The mask of one request, bool ``[queries, keys]``."""
        q = torch.arange(span.start, span.end, device=device)[:, None]
        k = torch.arange(span.end, device=device)[None, :]
        return torch.as_tensor(self.sees(q, k, span), device=device).expand(len(q), k.shape[1])

    def draw(self, span: QuerySpan) -> str:
        """Draw queries downwards and keys rightwards, with ``|`` before the query's first token."""
        lines = [f"{self.name}, queries {span.start} to {span.end - 1}"]
        for q, row in enumerate(self.dense(span).tolist(), span.start):
            keys = "".join("#" if visible else "." for visible in row)
            lines.append(f"{q:4} {keys[: span.start]}|{keys[span.start :]}")
        return "\n".join(lines)


def causal() -> Mask:
    """A query sees itself and everything before it."""
    return Mask("causal", lambda q, k, span: k <= q, MaskRule(1, WindowRule.NONE))


def block_causal(length: int) -> Mask:
    """LLaDA2: a query sees its whole block and all blocks before it."""
    return Mask(
        f"block_causal({length})",
        lambda q, k, span: k // length <= q // length,
        MaskRule(length, WindowRule.NONE),
    )


def bidirectional() -> Mask:
    """A query sees every key."""
    return Mask(
        "bidirectional",
        lambda q, k, span: (q >= 0) & (k >= 0),
        MaskRule(WHOLE, WindowRule.NONE),
    )


def window_causal(width: int) -> Mask:
    """A query sees itself and the W - 1 tokens before it."""
    return Mask(
        f"window_causal({width})",
        lambda q, k, span: (k <= q) & (q - k < width),
        MaskRule(1, WindowRule.SYMMETRIC),
        width,
    )


def window_symmetric(width: int) -> Mask:
    """A query sees W - 1 tokens in both directions: a canvas in vLLM's DiffusionGemma."""
    return Mask(
        f"window_symmetric({width})",
        lambda q, k, span: (q - k < width) & (k - q < width),
        MaskRule(WHOLE, WindowRule.SYMMETRIC),
        width,
    )


def window_reference(width: int) -> Mask:
    """A query sees the W - 1 tokens before the canvas and the whole canvas: the authors' rule.

    In Hugging Face's transformers, DiffusionGemma masks a canvas this way while denoising it.
    """
    return Mask(
        f"window_reference({width})",
        lambda q, k, span: (q >= 0) & (k > span.start - width),
        MaskRule(WHOLE, WindowRule.REFERENCE),
        width,
    )


def interval(
    q: torch.Tensor, span: QuerySpan, rule: MaskRule, window_width: int
) -> tuple[torch.Tensor, ...]:
    """The keys ``first <= k < end`` that queries ``q`` see by a rule: what the kernel computes.

    Both edges grow with q, so the edges of the first and the last query of a run say which keys any
    of them sees, and which all of them see. The rule is one of ints, and `window_width` is that of
    the layer, or 0. ``first`` and ``end`` have q's shape, int ``[n]``.
    """
    first = torch.zeros_like(q)
    end = ((q // rule.block + 1) * rule.block).clamp(max=span.end)
    if window_width and rule.window == WindowRule.SYMMETRIC:
        first, end = (q - window_width + 1).clamp(min=0), end.minimum(q + window_width)
    elif window_width and rule.window == WindowRule.REFERENCE:
        first = torch.full_like(q, max(0, span.start - window_width + 1))
    return first, end


# What `python -m vllm_dllm.ops.attention.masks NAME` draws.
PICTURES: dict[str, tuple[Mask, QuerySpan]] = {
    "causal": (causal(), QuerySpan(0, 12)),
    "block_causal": (block_causal(4), QuerySpan(0, 14)),
    "bidirectional": (bidirectional(), QuerySpan(8, 16)),
    "window_causal": (window_causal(5), QuerySpan(0, 12)),
    "window_symmetric": (window_symmetric(5), QuerySpan(8, 16)),
    "window_reference": (window_reference(5), QuerySpan(8, 16)),
}


def main(arguments: list[str]) -> int:
    """Print the picture of one mask, or of all."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_dllm.ops.attention.masks", description=main.__doc__
    )
    parser.add_argument("name", nargs="?", choices=tuple(PICTURES), help="all without one")
    name = parser.parse_args(arguments).name
    chosen = [PICTURES[name]] if name else list(PICTURES.values())
    print("\n\n".join(mask.draw(span) for mask, span in chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
