"""Fused commits: a block's commit and the next block's first denoise step in one forward pass.

A finished canvas leaves at once (`CommitPolicy.fused`), and the worker stays at its start. To
vLLM's scheduler the request then has L tokens that were never computed, as in a prompt, and the
next canvas as draft tokens behind them, so it grants 2 L tokens for one step. The first L tokens
write the block's keys and values, the other L are the new canvas, and the block-causal mask hides
the canvas from the block.

The scheduler must know a step's outcome before it plans the next step, so this needs synchronous
scheduling. With a step in flight see `engine.two_blocks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_dllm.engine.to_device import to_device


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
