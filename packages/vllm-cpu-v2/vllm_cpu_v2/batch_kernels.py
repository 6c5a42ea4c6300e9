"""numpy stand-ins for the kernels with which Model Runner V2 maintains its batch in every step.

Each function takes the launch grid and then the arguments of the Triton kernel, under the kernel's
own names; `launch.KernelStandIn` binds them. Arguments called `*_ptr` are the tensors that vLLM
passes at the launch, so `x.numpy()` is a view of the memory that the kernel would have written.
Tiling arguments are left out unless they limit what is written.

A batch has a few dozen requests at most, so most functions are a short loop over slices. At that
size a slice costs a third of a microsecond, and a torch operator ten times as much.

Notation in the shape comments: R = requests in the batch, S = slots (`max_num_reqs`),
T = tokens in the batch, G = KV cache groups, L = longest run of draft tokens.
"""

# Arguments keep the kernels' names, including capitals.
# ruff: noqa: N803

import numpy as np
from torch import Tensor

from vllm_cpu_v2.table_kernels import Grid, flat_view


def prepare_prefill_inputs(
    grid: Grid,  # (R,)
    input_ids_ptr: Tensor,  # [>= T]
    next_prefill_tokens_ptr: Tensor,  # [lookahead, S]
    num_lookahead: int,
    idx_mapping_ptr: Tensor,  # [R]
    query_start_loc_ptr: Tensor,  # [R + 1]
    all_token_ids_ptr: Tensor,  # [S, max_model_len]
    prefill_lens_ptr: Tensor,  # [S]
    num_computed_tokens_ptr: Tensor,  # [S]
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the prompt tokens of this step and the few that follow them.

    A canvas that was rolled back into the prompt still counts as prefill here and may reach past
    the end of the slot's row. The kernel then reads the next slot's tokens, which the draft tokens
    overwrite later; this function copies only the tokens that the row has.
    """
    slots = idx_mapping_ptr.numpy()[: grid[0]]
    computed = num_computed_tokens_ptr.numpy()[slots]
    limits = prefill_lens_ptr.numpy()[slots]
    todo = np.flatnonzero(computed < limits).tolist()
    if not todo:
        return
    starts = query_start_loc_ptr.numpy().tolist()
    tokens = all_token_ids_ptr.numpy()
    input_ids = input_ids_ptr.numpy()
    following = next_prefill_tokens_ptr.numpy()
    ahead = min(num_lookahead, LOOKAHEAD_BLOCK)
    for i in todo:
        slot, position, limit = int(slots[i]), int(computed[i]), int(limits[i])
        start, end = starts[i], starts[i + 1]
        run = tokens[slot, position : position + end - start]
        input_ids[start : start + len(run)] = run
        position += end - start
        run = tokens[slot, position : min(position + ahead, max(limit, position))]
        following[: len(run), slot] = run
        following[len(run) : ahead, slot] = 0


def prepare_pos_seq_lens(
    grid: Grid,  # (R + 1,): the last program pads
    pos_ptr: Tensor,  # [>= T]
    seq_lens_ptr: Tensor,  # [S]
    idx_mapping_ptr: Tensor,  # [R]
    query_start_loc_ptr: Tensor,  # [R + 1]
    num_computed_tokens_ptr: Tensor,  # [S]
    max_num_reqs: int,
) -> None:
    """Write positions of the batch's tokens, sequence lengths, and 0 for unused rows."""
    num_reqs = grid[0] - 1
    starts = query_start_loc_ptr.numpy()[: num_reqs + 1]
    lengths = np.diff(starts)
    computed = num_computed_tokens_ptr.numpy()[idx_mapping_ptr.numpy()[:num_reqs]]
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[:num_reqs] = computed + lengths
    seq_lens[num_reqs:max_num_reqs] = 0
    first, last = int(starts[0]), int(starts[num_reqs])
    positions = np.arange(first, last)
    positions += np.repeat(computed - starts[:-1], lengths)
    pos_ptr.numpy()[first:last] = positions


def combine_sampled_and_draft_tokens(
    grid: Grid,  # (R,)
    input_ids_ptr: Tensor,  # [>= T]
    idx_mapping_ptr: Tensor,  # [R]
    last_sampled_tokens_ptr: Tensor,  # [S, 1] or [S]
    query_start_loc_ptr: Tensor,  # [R + 1]
    seq_lens_ptr: Tensor,  # [R]
    prefill_len_ptr: Tensor,  # [S]
    draft_tokens_ptr: Tensor,  # [S, L]
    cu_num_logits_ptr: Tensor,  # [R + 1]
    logits_indices_ptr: Tensor,  # [rows of logits]
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write which rows get logits, and the input ids of the last token and of the drafts.

    A canvas is a run of draft tokens.
    """
    count = grid[0]
    slots = idx_mapping_ptr.numpy()[:count]
    limits = prefill_len_ptr.numpy()[slots].tolist()
    seq_lens = seq_lens_ptr.numpy()[:count].tolist()
    ends = query_start_loc_ptr.numpy()[1 : count + 1].tolist()
    cu = cu_num_logits_ptr.numpy()[: count + 1].tolist()
    input_ids, indices = input_ids_ptr.numpy(), logits_indices_ptr.numpy()
    drafts, last = draft_tokens_ptr.numpy(), flat_view(last_sampled_tokens_ptr)
    for i, slot in enumerate(slots.tolist()):
        num_logits = cu[i + 1] - cu[i]
        start = ends[i] - num_logits
        width = min(num_logits, BLOCK_SIZE)
        indices[cu[i] : cu[i] + width] = np.arange(start, start + width)
        if seq_lens[i] <= limits[i]:
            continue  # inside the prompt there are neither sampled nor draft tokens
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_lens[i] - num_logits >= limits[i]:
            input_ids[start] = last[slot]
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        if num_drafts > 0:
            start, width = ends[i] - num_drafts, min(num_drafts, BLOCK_SIZE)
            input_ids[start : start + width] = drafts[slot, :width]


def get_num_sampled_and_rejected(
    grid: Grid,  # (R,)
    num_sampled_ptr: Tensor,  # [R], read and written
    num_rejected_ptr: Tensor,  # [R]
    seq_lens_ptr: Tensor,  # [R]
    cu_num_logits_ptr: Tensor,  # [R + 1]
    idx_mapping_ptr: Tensor,  # [R]
    prefill_len_ptr: Tensor,  # [S]
) -> None:
    """Zero both counts inside a chunked prefill; otherwise rejected = logits - sampled."""
    count = grid[0]
    limits = prefill_len_ptr.numpy()[idx_mapping_ptr.numpy()[:count]]
    inside = seq_lens_ptr.numpy()[:count] < limits
    sampled = num_sampled_ptr.numpy()[:count]
    sampled[inside] = 0
    rejected = num_rejected_ptr.numpy()[:count]
    rejected[:] = np.diff(cu_num_logits_ptr.numpy()[: count + 1]) - sampled
    rejected[inside] = 0


def post_update(
    grid: Grid,  # (R,)
    idx_mapping_ptr: Tensor,  # [R]; rows with a negative entry are skipped
    num_computed_tokens_ptr: Tensor,  # [S]
    last_sampled_tokens_ptr: Tensor,  # [S, 1] or [S]
    output_bin_counts_ptr: Tensor | None,  # [S, vocabulary]
    sampled_tokens_ptr: Tensor,  # [R, L]
    num_sampled_ptr: Tensor,  # [R]
    num_rejected_ptr: Tensor,  # [R]
    query_start_loc_ptr: Tensor | None,  # [R + 1]
    all_token_ids_ptr: Tensor,  # [S, max_model_len]
    total_len_ptr: Tensor,  # [S]
    draft_tokens_ptr: Tensor | None = None,  # [R, drafts]
    draft_tokens_out_ptr: Tensor | None = None,  # [S, drafts]
    num_draft_tokens: int = 0,
) -> None:
    """Append the sampled tokens to each request and advance its computed length.

    A last canvas may end past max_model_len. The kernel then writes into the next slot's row. This
    function drops the surplus tokens, but counts lengths as the kernel does.
    """
    count = grid[0]
    num_sampled = num_sampled_ptr.numpy()[:count].tolist()
    delta = -num_rejected_ptr.numpy()[:count].astype(np.int64)
    if query_start_loc_ptr is not None:
        delta += np.diff(query_start_loc_ptr.numpy()[: count + 1])
    deltas = delta.tolist()
    computed, total = num_computed_tokens_ptr.numpy(), total_len_ptr.numpy()
    last, sampled = flat_view(last_sampled_tokens_ptr), sampled_tokens_ptr.numpy()
    tokens = all_token_ids_ptr.numpy()
    bins = None if output_bin_counts_ptr is None else output_bin_counts_ptr.numpy()
    for i, slot in enumerate(idx_mapping_ptr.numpy()[:count].tolist()):
        if slot < 0:
            continue
        if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
            draft_tokens_out_ptr[slot] = draft_tokens_ptr[i]
        sampled_count = num_sampled[i]
        if sampled_count > 0:
            run, begin = sampled[i, :sampled_count], int(total[slot])
            last[slot] = run[-1]
            total[slot] = begin + sampled_count
            room = tokens[slot, begin : begin + sampled_count]
            room[:] = run[: len(room)]
            if bins is not None:
                np.add.at(bins[slot], run, 1)  # a token may occur more than once
        if deltas[i]:
            computed[slot] += deltas[i]


def post_update_num_computed_tokens(
    grid: Grid,  # (R,)
    idx_mapping_ptr: Tensor,  # [R]
    num_computed_tokens_ptr: Tensor,  # [S]
    query_start_loc_ptr: Tensor,  # [R + 1]
) -> None:
    """Advance every request of the batch by its query length."""
    count = grid[0]
    slots = idx_mapping_ptr.numpy()[:count]
    num_computed_tokens_ptr.numpy()[slots] += np.diff(query_start_loc_ptr.numpy()[: count + 1])


def expand_idx_mapping(
    grid: Grid,  # (R,)
    idx_mapping_ptr: Tensor,  # [R]
    expanded_idx_mapping_ptr: Tensor,  # [rows of logits]
    expanded_local_pos_ptr: Tensor,  # [rows of logits]
    cu_num_logits_ptr: Tensor,  # [R + 1]
    BLOCK_SIZE: int,
) -> None:
    """Write for every row of logits its request's slot and its index within the request."""
    expanded, local = expanded_idx_mapping_ptr.numpy(), expanded_local_pos_ptr.numpy()
    cu = cu_num_logits_ptr.numpy()[: grid[0] + 1].tolist()
    ramp = np.arange(BLOCK_SIZE)
    for i, slot in enumerate(idx_mapping_ptr.numpy()[: grid[0]].tolist()):
        start, width = cu[i], min(cu[i + 1] - cu[i], BLOCK_SIZE)
        expanded[start : start + width] = slot
        local[start : start + width] = ramp[:width]
