"""Where a request ends, and how its output leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Where a request ends, and how its output leaves.

    Attributes:
        tokens: how many tokens the request may still output.
        ends: token ids that end the request.
        read_only: the first canvas is the whole answer.
        stream_prefix: the decided beginning of a canvas leaves before the canvas is finished.
        records: every pass over the request's canvases is recorded.
        whole: a canvas leaves when all its positions are decided, not when its answer is.
    """

    tokens: int
    ends: Iterable[int] = ()
    read_only: bool = False
    stream_prefix: bool = False
    records: bool = False
    whole: bool = False
