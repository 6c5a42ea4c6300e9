"""Row statistics over a head that is spread over ranks: ranks exchange results, not logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_dllm.ops.compiled import compiled
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.partials import SoftmaxPartials
from vllm_dllm.ops.statistics.rows import RowStatistics, greedy_part
from vllm_dllm.ops.statistics.tiled import FAR

# The number of float32 copies of a rank's share of the logits that are alive together.
COPIES = 3


def partials_of_rank(logits: torch.Tensor, first: int, forbidden: int) -> SoftmaxPartials:
    """The partials of one rank, over its own ids.

    Args:
        logits: float32 ``[rows, ids]``, at least one id; not modified.
        first: the first of these ids.
        forbidden: token id, of this rank or not, that counts in the sums and is never chosen.

    Returns:
        Partials of shape ``[rows]``. Nothing is drawn: the argmax takes the place of the drawn
        token.
    """
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    best, index = torch.where(ids != forbidden, logits, -torch.inf).max(-1)
    origin = logits.amax(-1)
    base = torch.where(origin == -torch.inf, 0.0, origin)
    distance = (logits - base[:, None]).clamp_min_(FAR)
    weight = distance.exp()
    token = index + first
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
    """The statistics that `row_statistics` computes from whole rows of logits.

    Args:
        hidden: ``[rows, hidden]``, the same on all ranks.
        head: a head that has a `shard`.
        forbidden: token id that takes part in the sums and is never chosen.
        entropy: also compute entropies (`EntropyStatistics`).
        budget: bytes that temporaries may take.
        compile: compile `partials_of_rank`.

    Returns:
        Statistics of shape ``[rows]``, the same on all ranks.
    """
    assert head.shard is not None
    # All ranks must exchange partials equally often, so the width includes a rank's padding.
    rows = max(1, budget // (4 * COPIES * head.shard.width))
    parts = []
    for chunk in hidden.split(rows):
        partials = _of_this_rank(chunk, head, forbidden, compile).merge_ranks(head.shard)
        # Probabilities are the model's own, at temperature 1: no row counts as greedy.
        greedy = torch.zeros_like(partials.token, dtype=torch.bool)
        parts.append(greedy_part(partials.statistics(greedy), entropy))
    return type(parts[0]).join(parts)


def without(head: Head, forbidden: int) -> Head:
    """The same head with a token that is never chosen or drawn."""

    def logits(hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        values = head.logits(hidden, first, end)
        if first <= forbidden < end:
            values[:, forbidden - first] = -torch.inf
        return values

    return replace(head, logits=logits)


def _of_this_rank(
    hidden: torch.Tensor, head: Head, forbidden: int, compile: bool
) -> SoftmaxPartials:
    """The partials of this rank for hidden states ``[rows, hidden]``."""
    own = head.ids
    if not len(own):
        return _partials_without_ids(hidden)
    function = compiled(partials_of_rank) if compile else partials_of_rank
    return function(head.logits(hidden, own.start, own.stop), own.start, forbidden)


def _partials_without_ids(hidden: torch.Tensor) -> SoftmaxPartials:
    """The partials of a rank that has only padding."""
    rows = len(hidden)
    none = torch.full((rows,), -torch.inf, device=hidden.device)
    zero = torch.zeros(rows, device=hidden.device)
    token = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
    return SoftmaxPartials(
        none, token, none, none, token, none, zero, zero, zero.new_empty((rows, 0))
    )
