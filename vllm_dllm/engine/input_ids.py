"""Token ids of a step's input that vLLM's runner does not write."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_dllm.engine.to_device import to_device


def read_canvases(input_batch: Any, canvases: torch.Tensor) -> None:
    """Write the canvases of a step (vLLM's draft tokens, int ``[slots, L]``) into the input.

    vLLM has done so except for canvases that end with the prompt, see `SlotState.enter`: it takes
    their tokens for prompt tokens, which it writes into the input of prefills only.
    """
    drafts = input_batch.num_draft_tokens_per_req
    if not input_batch.num_draft_tokens:
        return
    slots, ids = input_batch.idx_mapping[: len(drafts)], input_batch.input_ids
    if not drafts.all():
        slots = slots[to_device(np.flatnonzero(drafts), slots.device)]
    tokens = canvases[slots].flatten()
    if len(tokens) > input_batch.num_draft_tokens:  # the context cuts some of them
        place = np.arange(canvases.shape[1]) < drafts[drafts > 0, None]
        tokens = tokens[to_device(np.flatnonzero(place), tokens.device)]
    ids[input_batch.logits_indices] = tokens.to(ids.dtype)


def first_tokens(
    input_batch: Any, rows: np.ndarray, count: np.ndarray, device: torch.device
) -> torch.Tensor:
    """The first `count` tokens of each of these rows (both int ``[n]``) of a batch.

    Returns each token's row, and where it is in the input, int64 ``[2, tokens]``.
    """
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    token = np.repeat(input_batch.query_start_loc_np[rows], count) + nth
    both: np.ndarray = np.stack([np.repeat(rows, count), token])
    return to_device(both, device)


def read_again(input_batch: Any, history: torch.Tensor) -> None:
    """Write the tokens of the blocks whose commit shares this pass into the input.

    The worker stays at the start of a canvas that has left without a commit. vLLM's scheduler then
    sees L uncomputed tokens, as in a prompt, followed by the next canvas as draft tokens, so it
    grants 2 L tokens for one step. vLLM writes only prompt tokens and draft tokens into the input,
    and the first L are neither. `history` has every token of the requests, int ``[slots, ...]``.
    """
    if input_batch.num_draft_tokens == input_batch.num_tokens:  # nothing but canvases
        return
    drafts = input_batch.num_draft_tokens_per_req
    before = input_batch.num_scheduled_tokens - (0 if drafts is None else drafts)
    is_prompt = input_batch.num_computed_prefill_tokens_np < input_batch.prefill_len_np
    rows = np.flatnonzero((before > 0) & ~is_prompt)
    if not len(rows):
        return
    row, at = first_tokens(input_batch, rows, before[rows], history.device)
    slot, position = input_batch.idx_mapping[row].long(), input_batch.positions[at].long()
    input_batch.input_ids[at] = history[slot, position].to(input_batch.input_ids.dtype)
