"""Row statistics over a head that is spread over ranks: ranks exchange results, not logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows import RowStatistics, greedy_part
from vllm_dllm.ops.statistics.tiled import FAR

# Float32 values of a rank's share of the logits that are alive together.
COPIES = 3


def partials_of_rank(logits: torch.Tensor, first: int, forbidden: int) -> SoftmaxPartials:
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
    return SoftmaxPartials(
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
    compile: bool = False,
) -> RowStatistics:
    """What `row_statistics` computes from whole rows of logits.

    Args:
        hidden: ``[rows, hidden]``, the same on all ranks.
        head: with a `shard`.
        forbidden: token id that takes part in the sums and is never chosen.
        entropy: also compute entropies (`EntropyStatistics`).
        budget: bytes that temporaries may take.
        compile: use the kernel that PyTorch's compiler writes for a rank's part.

    Returns:
        Statistics of shape ``[rows]``, the same on all ranks.
    """
    assert head.shard is not None
    # By the width with padding, because all ranks must exchange results equally often.
    rows = max(1, budget // (4 * COPIES * head.shard.width))
    parts = []
    for part in hidden.split(rows):
        found = _of_this_rank(part, head, forbidden, compile).merge_ranks(head.shard)
        # Probabilities are the model's own, at temperature 1: no row counts as greedy.
        never = torch.zeros_like(found.token, dtype=torch.bool)
        parts.append(greedy_part(found.statistics(never), entropy))
    return type(parts[0]).join(parts)


def without(head: Head, forbidden: int) -> Head:
    """The same head with a token that is never chosen nor drawn."""

    def logits(hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        found = head.logits(hidden, first, end)
        if first <= forbidden < end:
            found[:, forbidden - first] = -torch.inf
        return found

    return replace(head, logits=logits)


def _of_this_rank(
    hidden: torch.Tensor, head: Head, forbidden: int, compile: bool
) -> SoftmaxPartials:
    own = head.ids
    if not len(own):
        return _nothing(hidden)
    find = compiled(partials_of_rank) if compile else partials_of_rank
    return find(head.logits(hidden, own.start, own.stop), own.start, forbidden)


def _nothing(hidden: torch.Tensor) -> SoftmaxPartials:
    """The partials of a rank that has only padding."""
    rows = len(hidden)
    none = torch.full((rows,), -torch.inf, device=hidden.device)
    zero = torch.zeros(rows, device=hidden.device)
    token = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
    return SoftmaxPartials(
        none, token, none, none, token, none, zero, zero, zero.new_empty((rows, 0))
    )
