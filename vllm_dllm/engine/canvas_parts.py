"""Canvases put together from those of several algorithms, or from before and after a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_dllm.decoding import Canvas, Update
from vllm_dllm.engine.algorithm_state import AlgorithmBatch, in_batch_order
from vllm_dllm.engine.step_plan import StepPlan


def merged(plan: StepPlan, updates: list[Update]) -> tuple[Canvas, torch.Tensor]:
    """The canvases of all algorithms and whether they are done (bool ``[n]``), in batch order."""
    tokens, masked, done = (
        in_batch_order(parts, plan.batches)
        for parts in (
            [update.canvas.tokens for update in updates],
            [update.canvas.masked for update in updates],
            [update.done for update in updates],
        )
    )
    return Canvas(tokens, masked, plan.before.fixed), done


def kept_where(old: torch.Tensor, before: Canvas, after: Canvas) -> Canvas:
    """The canvases of ``before`` where ``old`` (bool ``[n]``) is true, else those of ``after``."""
    keep = old[:, None]
    return Canvas(
        torch.where(keep, before.tokens, after.tokens),
        torch.where(keep, before.masked, after.masked),
        after.fixed,
    )


def old_where(
    waits: torch.Tensor, batch: AlgorithmBatch, new: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """An algorithm's state: as it was for canvases that wait (bool ``[n]``), else `new`."""
    rows = batch.rows(waits)
    return {
        name: torch.where(rows.view(-1, *[1] * (tensor.ndim - 1)), batch.state[name], tensor)
        for name, tensor in new.items()
    }
