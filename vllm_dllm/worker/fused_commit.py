"""Fused commits: a block's commit and the next block's first denoise step in one forward pass.

A finished canvas leaves at once (`CommitPolicy.fused`), and the worker stays at its start. To
vLLM's scheduler the request then has L tokens that were never computed, as in a prompt, and the
next canvas as draft tokens behind them, so it grants 2 L tokens for one step. The first L tokens
write the block's keys and values, the other L are the new canvas, and the block-causal mask hides
the canvas from the block.

The scheduler must know a step's outcome before it plans the next step, so this needs synchronous
scheduling. With a step in flight a block is committed in a pass of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_dllm.settings.ranges import SettingsError
from vllm_dllm.settings.server import DllmSettings
from vllm_dllm.worker.to_device import to_device

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def fuses(vllm_config: VllmConfig, settings: DllmSettings, in_place: bool) -> bool:
    """Whether commits are fused.

    Args:
        vllm_config: vLLM's configuration.
        settings: the server's settings.
        in_place: see `Family.commits_in_place`.

    Raises:
        SettingsError: ``dllm.fused_commit=true`` where that is impossible, with the reason.
    """
    from vllm import envs

    obstacles = {
        "the model's commits and steps have different masks": not in_place,
        "scheduling is asynchronous": vllm_config.scheduler_config.async_scheduling,
        "there are pipeline stages": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "skip_last_commit is off": not settings.skip_last_commit,
        # vLLM's check would take the mark of a canvas that is not written yet for a NaN.
        "VLLM_RAISE_ON_LOGIT_NANS is set": bool(envs.VLLM_RAISE_ON_LOGIT_NANS),
    }
    reasons = [reason for reason, holds in obstacles.items() if holds]
    if settings.fused_commit and reasons:
        raise SettingsError(f"dllm.fused_commit=true: impossible, because {reasons[0]}")
    return settings.fused_commit is not False and not reasons


def read_again(input_batch: Any, history: torch.Tensor) -> None:
    """Write the tokens of blocks that are committed in this step into the model's input.

    vLLM only writes prompt tokens and draft tokens there, and these are neither.

    Args:
        input_batch: vLLM's ``InputBatch``.
        history: int ``[slots, positions]``, every token of the requests.
    """
    drafts = input_batch.num_draft_tokens_per_req
    before = input_batch.num_scheduled_tokens - (0 if drafts is None else drafts)
    is_prompt = input_batch.num_computed_prefill_tokens_np < input_batch.prefill_len_np
    rows = np.flatnonzero((before > 0) & ~is_prompt)
    if not len(rows):
        return
    count = before[rows]
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    token = np.repeat(input_batch.query_start_loc_np[rows], count) + nth
    both: np.ndarray = np.stack([np.repeat(rows, count), token])
    row, at = to_device(both, history.device)
    slot, position = input_batch.idx_mapping[row].long(), input_batch.positions[at].long()
    input_batch.input_ids[at] = history[slot, position].to(input_batch.input_ids.dtype)
