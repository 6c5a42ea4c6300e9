"""Which keys a query sees, as the two numbers for each request that a kernel takes.

A `MaskRule` is a block length and a window rule. With the window's width, which belongs to the
layer, they determine the keys of every query as one interval. Pictures of the masks are in
docs/attention.md; `tests/support/ops/attention_reference.py` has their predicates.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

# A block longer than any sequence: every query in it sees to the sequence's end.
WHOLE = 1 << 30


class WindowRule(IntEnum):
    """The left edge of a sliding window of width W; see the setting ``dllm.window``."""

    NONE = 0
    # |q - k| < W. With causal blocks this is the usual window: the right half is hidden anyway.
    SYMMETRIC = 1
    # From the W - 1 tokens before the query's first token on, for every token of the query.
    REFERENCE = 2


class MaskRule(NamedTuple):
    """A mask as the numbers that a kernel takes: ints, or int32 tensors ``[requests]``.

    Attributes:
        block: the block length; a query sees everything up to the end of its block. 1 is causal, L
            block-causal, `WHOLE` bidirectional.
        window: a `WindowRule`; the window's width belongs to the layer, not to the request.
    """

    block: Any
    window: Any
