"""Commits that verify: a causal pass over a drafted canvas keeps what it predicts itself.

The canvas of an algorithm that `verifies` begins with the last token that vLLM counts, whose keys
and values are not final: a tail of 1. So row i of its commit predicts position i + 1. Of a canvas x
of L positions, the pass confirms x_1 ... x_c and predicts one token more::

    canvas           x_0   x_1   ...   x_c   x_(c+1)   ...
    predicted        v_0   v_1   ...   v_c             v_i = x_(i+1) for i < c
    leaves           v_0   v_1   ...   v_c             c + 1 tokens
    keys and values  x_0   x_1   ...   x_c             are final, for c + 1 positions
    next canvas                                        v_c, then masks

To vLLM, c + 1 of the L draft tokens are accepted, and the others rejected.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.engine.contracts import StepPlan
from vllm_dllm.engine.slots import Phase, SlotStatus


def confirmed(
    drafted: torch.Tensor, predicted: torch.Tensor, width: torch.Tensor | int
) -> torch.Tensor:
    """The number of tokens that a verifying pass yields, int64 ``[n]``, at least 1.

    `drafted` are the canvases that the pass has read, `predicted` the likeliest token of each row,
    int64 ``[n, L]`` both, and `width` is that of `StepPlan`.
    """
    agrees = drafted[:, 1:] == predicted[:, :-1]
    if not isinstance(width, int):
        position = torch.arange(1, drafted.shape[1], device=drafted.device)
        agrees = agrees & (position < width[:, None])
    return agrees.cumprod(1).sum(1) + 1


def verified(
    plan: StepPlan,
    now: SlotStatus,
    predicted: torch.Tensor,
    sound: torch.Tensor,
    output: SamplerOutput,
    tokens: torch.Tensor,
) -> tuple[SamplerOutput, torch.Tensor]:
    """Output what leaves after a step in which some commits verify, and move their slots.

    Args:
        plan: the batch before the step, with `Batch.verifies`; the slots have been written.
        now: the columns of its rows.
        predicted: int64 ``[n, L]``, the likeliest token of each row.
        sound: bool ``[n]``, canvases that were read without NaN; the others output nothing.
        output: what the step returns for canvases that are not verified; the result has all.
        tokens: int64 ``[n, L]``, what these read next; the result has all.
    """
    assert plan.batch.verifies is not None
    slots, slot = plan.state, plan.slots
    rows = plan.batch.verifies & (now.phase == int(Phase.COMMIT))
    count = confirmed(now.canvas.tokens, predicted, plan.width)
    count = torch.minimum(count, now.remaining.clamp_min(1))
    last = predicted.gather(1, count[:, None] - 1)[:, 0]

    def revised(column: torch.Tensor, value: torch.Tensor | int | bool) -> None:
        """Write `value` into a slot's column where the canvas was verified."""
        column.index_copy_(0, slot, torch.where(rows, value, column.index_select(0, slot)))

    revised(slots.start, now.start + count)
    revised(slots.remaining, now.remaining - count)
    revised(slots.tail, 1)
    revised(slots.tokens[:, 0], last)
    revised(slots.masked[:, 0], False)
    revised(slots.fixed[:, 0], True)
    tokens = tokens.clone()
    tokens[:, 0] = torch.where(rows, last, tokens[:, 0])
    sent = count * sound
    rejected = (plan.width - sent).int()
    return (
        replace(
            output,
            sampled_token_ids=torch.where(rows[:, None], predicted, output.sampled_token_ids),
            num_sampled=torch.where(rows, sent.int(), output.num_sampled),
            num_rejected=torch.where(rows, rejected, output.num_rejected),
        ),
        tokens,
    )
