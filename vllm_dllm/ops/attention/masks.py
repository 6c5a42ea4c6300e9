"""Which keys a query sees: one small predicate for each mask, and a picture of it.

    python -m vllm_dllm.ops.attention.masks block_causal

A predicate takes positions in the request's sequence, ``q`` of the query and ``k`` of the key,
and the request's `Span`; it says nothing of batches, pages or tiles. Ints and tensors that
broadcast both do. Keys exist only in ``0 <= k < span.end``.

A kernel is not given predicates but a `Rule`: a block length and a window for each request, from
which every query's keys follow as one interval (`interval`). That a rule means its mask is what
`tests/ops/test_masks.py` proves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

# A block that no sequence fills: whatever its position, a query sees to the sequence's end.
WHOLE = 1 << 30


class Span(NamedTuple):
    """A request's query: positions ``start <= q < end`` of a sequence of ``end`` tokens."""

    start: Any
    end: Any


# (q, k, span) to bool; ints or int tensors that broadcast.
Predicate = Callable[[Any, Any, Span], Any]


class Window(IntEnum):
    """Where the left edge of a sliding window of width W lies."""

    NONE = 0
    SYMMETRIC = 1  # |q - k| < W; with causal blocks only the left half is left
    REFERENCE = 2  # the last W - 1 tokens before the query's first, for all of the query


class Rule(NamedTuple):
    """A mask in the numbers that a kernel takes; ints, or int32 tensors ``[requests]``.

    Attributes:
        block: a query sees to the end of its block of so many positions: 1 is causal, L
            block-causal, `WHOLE` bidirectional.
        window: a `Window`; its width belongs to the layer, not to the request.
    """

    block: Any
    window: Any


@dataclass(frozen=True)
class Mask:
    """A mask: its predicate, and the same for a kernel.

    Attributes:
        name: as one would write it, e.g. ``block_causal(32)``.
        sees: whether query q sees key k.
        rule: the same for a kernel.
        width: W of its window, 0 without one.
    """

    name: str
    sees: Predicate
    rule: Rule
    width: int = 0

    def dense(self, span: Span, device: torch.device | None = None) -> torch.Tensor:
        """Bool ``[queries, keys]`` of one request."""
        q = torch.arange(span.start, span.end, device=device)[:, None]
        k = torch.arange(span.end, device=device)[None, :]
        return torch.as_tensor(self.sees(q, k, span), device=device).expand(len(q), k.shape[1])

    def draw(self, span: Span) -> str:
        """Queries downwards, keys to the right, ``|`` before the first token of the query."""
        lines = [f"{self.name}, queries {span.start} to {span.end - 1}"]
        for q, row in enumerate(self.dense(span).tolist(), span.start):
            keys = "".join("#" if seen else "." for seen in row)
            lines.append(f"{q:4} {keys[: span.start]}|{keys[span.start :]}")
        return "\n".join(lines)


def causal() -> Mask:
    """A query sees itself and what came before."""
    return Mask("causal", lambda q, k, span: k <= q, Rule(1, Window.NONE))


def block_causal(length: int) -> Mask:
    """LLaDA2: a query sees its whole block, and the blocks before."""
    return Mask(
        f"block_causal({length})",
        lambda q, k, span: k // length <= q // length,
        Rule(length, Window.NONE),
    )


def bidirectional() -> Mask:
    """A query sees every key."""
    return Mask("bidirectional", lambda q, k, span: (q >= 0) & (k >= 0), Rule(WHOLE, Window.NONE))


def window_causal(width: int) -> Mask:
    """A query sees itself and the W - 1 tokens before."""
    return Mask(
        f"window_causal({width})",
        lambda q, k, span: (k <= q) & (q - k < width),
        Rule(1, Window.SYMMETRIC),
        width,
    )


def window_symmetric(width: int) -> Mask:
    """A query sees W - 1 tokens in both directions: a canvas in vLLM's DiffusionGemma."""
    return Mask(
        f"window_symmetric({width})",
        lambda q, k, span: (q - k < width) & (k - q < width),
        Rule(WHOLE, Window.SYMMETRIC),
        width,
    )


def window_reference(width: int) -> Mask:
    """A query sees the W - 1 tokens before the canvas, and the canvas: the authors' rule.

    This is how DiffusionGemma masks a canvas that is being denoised in transformers.
    """
    return Mask(
        f"window_reference({width})",
        lambda q, k, span: (q >= 0) & (k > span.start - width),
        Rule(WHOLE, Window.REFERENCE),
        width,
    )


def interval(q: torch.Tensor, span: Span, rule: Rule, width: int) -> tuple[torch.Tensor, ...]:
    """A rule's keys ``first <= k < end`` for queries ``q``: what the kernel computes.

    Both edges grow with q, so the keys of a run of queries are the interval from the first
    one's first key to the last one's last, and those between are seen by all.

    Args:
        q: int ``[n]``, positions.
        span: the request's.
        rule: its rule.
        width: W of the layer, 0 for a layer without window.

    Returns:
        ``first`` and ``end``, of q's shape.
    """
    first = torch.zeros_like(q)
    end = ((q // rule.block + 1) * rule.block).clamp(max=span.end)
    if width and rule.window == Window.SYMMETRIC:
        first, end = (q - width + 1).clamp(min=0), end.minimum(q + width)
    elif width and rule.window == Window.REFERENCE:
        first = torch.full_like(q, max(0, span.start - width + 1))
    return first, end


# What `python -m vllm_dllm.ops.attention.masks NAME` draws.
PICTURES: dict[str, tuple[Mask, Span]] = {
    "causal": (causal(), Span(0, 12)),
    "block_causal": (block_causal(4), Span(0, 14)),
    "bidirectional": (bidirectional(), Span(8, 16)),
    "window_causal": (window_causal(5), Span(0, 12)),
    "window_symmetric": (window_symmetric(5), Span(8, 16)),
    "window_reference": (window_reference(5), Span(8, 16)),
}


def main(arguments: list[str]) -> int:
    """Print a mask's picture, or all."""
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
