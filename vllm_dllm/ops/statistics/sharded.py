"""The statistics of `row_stats` over a head that is spread over ranks: results meet, not logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import Found
from vllm_dllm.ops.statistics.rows import RowStatistics
from vllm_dllm.ops.statistics.sampled import wanted_of
from vllm_dllm.ops.statistics.tiled import FAR

# Float32 values of a rank's share of the logits that are alive together.
COPIES = 3
# A rank's logits [rows, ids], its first id, and the forbidden id, to what it finds.
Find = Callable[[torch.Tensor, int, int], Found]


def found_among(logits: torch.Tensor, first: int, forbidden: int) -> Found:
    """What one rank finds among its own ids.

    Args:
        logits: float32 ``[rows, ids]``, at least one id; left as they are.
        first: the first of these ids.
        forbidden: token id, of this rank or not, that counts in the sums and is never chosen.

    Returns:
        Findings of shape ``[rows]``. Nothing is drawn.
    """
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    best, at = torch.where(ids != forbidden, logits, -torch.inf).max(-1)
    origin = logits.amax(-1)
    base = torch.where(origin == -torch.inf, 0.0, origin)
    distance = (logits - base[:, None]).clamp_min_(FAR)
    weight = distance.exp()
    token = at + first
    return Found(
        best=best,
        token=token,
        origin=origin,
        drawn=best,
        sample=token,
        scaled=best,
        sum=weight.sum(-1),
        weighted=torch.linalg.vecdot(weight, distance),
        soft=logits.new_empty((len(logits), 0)),
    )


def sharded_statistics(
    hidden: torch.Tensor,
    head: Head,
    forbidden: int,
    entropy: bool,
    budget: int,
    find: Find = found_among,
) -> RowStatistics:
    """What `row_statistics` computes from whole rows of logits.

    Args:
        hidden: ``[rows, hidden]``, the same on all ranks.
        head: with a `shard`.
        forbidden: token id that takes part in the sums and is never chosen.
        entropy: also compute entropies (`EntropyStatistics`).
        budget: bytes that temporaries may take.
        find: `found_among`, or what a compiler makes of it.

    Returns:
        Statistics of shape ``[rows]``, the same on all ranks.
    """
    assert head.shard is not None
    # By the width with padding: all ranks must meet equally often.
    rows = max(1, budget // (4 * COPIES * head.shard.width))
    parts = []
    for part in hidden.split(rows):
        found = _share(part, head, forbidden, find).met(head.shard)
        # Probabilities are the model's own, at temperature 1: no row counts as greedy.
        never = torch.zeros_like(found.token, dtype=torch.bool)
        parts.append(wanted_of(found.statistics(never), entropy))
    return type(parts[0]).join(parts)


def without(head: Head, forbidden: int) -> Head:
    """The same head with a token that is never chosen nor drawn."""

    def logits(hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        found = head.logits(hidden, first, end)
        if first <= forbidden < end:
            found[:, forbidden - first] = -torch.inf
        return found

    return replace(head, logits=logits)


def _share(hidden: torch.Tensor, head: Head, forbidden: int, find: Find) -> Found:
    own = head.ids
    if not len(own):
        return _nothing(hidden)
    return find(head.logits(hidden, own.start, own.stop), own.start, forbidden)


def _nothing(hidden: torch.Tensor) -> Found:
    """Of a rank that has only padding."""
    rows = len(hidden)
    none = torch.full((rows,), -torch.inf, device=hidden.device)
    zero = torch.zeros(rows, device=hidden.device)
    token = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
    return Found(none, token, none, none, token, none, zero, zero, zero.new_empty((rows, 0)))
