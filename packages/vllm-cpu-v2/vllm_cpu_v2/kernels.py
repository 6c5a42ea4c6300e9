"""numpy stand-ins for the Triton kernels with which Model Runner V2 maintains its batch.

Each function takes the launch grid and then the arguments of the Triton kernel, under the kernel's
own names; `launch.KernelStandIn` binds them. Arguments called `*_ptr` are the tensors that vLLM
passes at the launch, so `x.numpy()` is a view of the memory that the kernel would have written. The
block tables of several KV cache groups come as raw addresses (`data_ptr()` in a uint64 tensor) with
a row stride for each, so they are copied by address.

The functions do what diffusion models need, and assert that they are not asked for more. A batch
has a few dozen requests at most, so most of them are a short loop over slices. At that size a slice
costs a third of a microsecond, and a torch operator ten times as much.

Notation in the shape comments: R = requests in the batch, S = slots (`max_num_reqs`),
T = tokens in the batch, G = KV cache groups, L = length of a canvas, N = rows of logits,
V = vocabulary, K = token ids per row.
"""

# Arguments keep the kernels' names, including capitals.
# ruff: noqa: N803

import ctypes

import numpy as np
from torch import Tensor

Grid = tuple[int, ...]


def apply_write(
    grid: Grid,
    output_ptr: Tensor,  # [rows, width] or [rows]; MULTI_GROUP: addresses of int32, uint64 [G]
    output_stride: int | Tensor,  # row stride; MULTI_GROUP: [G]
    write_indices_ptr: Tensor,  # [writes]
    write_starts_ptr: Tensor,  # [writes]
    write_contents_ptr: Tensor,  # [sum of lengths], of the table's dtype
    write_cu_lens_ptr: Tensor,  # [writes], running sum of the lengths
    write_group_ids_ptr: Tensor | None,  # [writes], only with MULTI_GROUP
    MULTI_GROUP: bool,
) -> None:
    """Copy every staged run of values to (row, start) of its table."""
    count = grid[0]
    if MULTI_GROUP:
        assert isinstance(output_stride, Tensor) and write_group_ids_ptr is not None
        tables, strides = output_ptr.tolist(), output_stride.tolist()
        groups = write_group_ids_ptr.tolist()[:count]
    else:
        tables, strides, groups = [output_ptr.data_ptr()], [output_stride], [0] * count
    rows = write_indices_ptr.tolist()[:count]
    starts = write_starts_ptr.tolist()[:count]
    ends = write_cu_lens_ptr.tolist()[:count]
    size, source = write_contents_ptr.element_size(), write_contents_ptr.data_ptr()
    begin = 0
    for group, row, start, end in zip(groups, rows, starts, ends, strict=True):
        target = tables[group] + size * (row * strides[group] + start)
        ctypes.memmove(target, source + size * begin, size * (end - begin))
        begin = end


def gather_block_tables(
    grid: Grid,  # (G, R after padding)
    batch_idx_to_req_idx: Tensor,  # [R]
    src_block_table_ptrs: Tensor,  # uint64 [G], each the address of int32 [S, stride]
    dst_block_table_ptrs: Tensor,  # uint64 [G], each the address of int32 [S, stride]
    block_table_strides: Tensor,  # [G]
    num_blocks_ptr: Tensor,  # [G, S]
    num_reqs: int,
    num_computed_tokens_ptr: Tensor | None = None,  # [S]; this and the rest since vLLM 0.33
    sliding_window_reach_ptr: Tensor | None = None,  # [G], tokens; 0 without a window
    block_sizes_ptr: Tensor | None = None,  # [G]
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Put the batch's block-table rows in batch order and zero the padding rows.

    As in the kernel, a row is written up to its number of blocks; the rest is stale and never read.
    With `MASK_SLIDING_WINDOW`, pages that end before the first token that the step's first query
    can see are replaced by the null page, 0.
    """
    slots = batch_idx_to_req_idx.tolist()
    tables = zip(
        src_block_table_ptrs.tolist(),
        dst_block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        num_blocks_ptr.numpy(),
        strict=True,
    )
    for source, target, stride, num_blocks in tables:
        row_bytes = 4 * stride
        for row, slot in enumerate(slots):
            start = source + slot * row_bytes
            ctypes.memmove(target + row * row_bytes, start, 4 * int(num_blocks[slot]))
        if grid[1] > num_reqs:
            ctypes.memset(target + num_reqs * row_bytes, 0, (grid[1] - num_reqs) * row_bytes)
    if MASK_SLIDING_WINDOW:
        assert num_computed_tokens_ptr is not None and block_sizes_ptr is not None
        assert sliding_window_reach_ptr is not None
        reach = sliding_window_reach_ptr.numpy()[:, None]
        before = np.maximum(num_computed_tokens_ptr.numpy()[slots] - reach, 0) * (reach > 0)
        unseen = before // block_sizes_ptr.numpy()[:, None]  # [G, R]
        strides = block_table_strides.tolist()
        for target, stride, counts in zip(
            dst_block_table_ptrs.tolist(), strides, unseen.tolist(), strict=True
        ):
            for row, count in enumerate(counts):
                ctypes.memset(target + 4 * row * stride, 0, 4 * count)


def compute_slot_mappings(
    grid: Grid,  # (G, R + 1): the last program of a group pads
    max_num_tokens: int,
    idx_mapping: Tensor,  # [R]
    query_start_loc: Tensor,  # [R + 1]
    pos: Tensor,  # [T], consecutive within a request
    block_table_ptrs: Tensor,  # uint64 [G], each the address of int32 [S, stride]
    block_table_strides: Tensor,  # [G]
    block_sizes: Tensor,  # [G]
    slot_mapping_enabled: Tensor,  # bool [G]
    slot_mappings_ptr: Tensor,  # [G, max_num_tokens]
    CP_SIZE: int,
    PAD_ID: int,
) -> None:
    """Write every token's slot in the KV cache, and `PAD_ID` where there is no token."""
    assert CP_SIZE == 1 and all(slot_mapping_enabled.tolist())
    starts, positions, out = query_start_loc.tolist(), pos.numpy(), slot_mappings_ptr.numpy()
    tables = zip(
        block_table_ptrs.tolist(), block_table_strides.tolist(), block_sizes.tolist(), strict=True
    )
    for group, (address, stride, size) in enumerate(tables):
        slot_ids = out[group]
        for i, slot in enumerate(idx_mapping.tolist()):
            token, end = starts[i], starts[i + 1]
            if token == end:
                continue
            block, offset = divmod(int(positions[token]), size)
            entry = address + 4 * (slot * stride + block)
            while token < end:  # a request's tokens are consecutive, a run of them in each block
                run = min(size - offset, end - token)
                first = ctypes.c_int32.from_address(entry).value * size + offset
                slot_ids[token : token + run] = np.arange(first, first + run)
                token, entry, offset = token + run, entry + 4, 0
        slot_ids[starts[grid[1] - 1] : max_num_tokens] = PAD_ID


def prepare_prefill_inputs(
    grid: Grid,  # (R,)
    input_ids_ptr: Tensor,  # [>= T]
    idx_mapping_ptr: Tensor,  # [R]
    query_start_loc_ptr: Tensor,  # [R + 1]
    all_token_ids_ptr: Tensor,  # [S, max_model_len]
    prefill_lens_ptr: Tensor,  # [S]
    num_computed_tokens_ptr: Tensor,  # [S]
) -> None:
    """Copy the prompt tokens of this step.

    The kernel also copies the tokens that follow them, which only a speculator reads.

    A canvas that was rolled back into the prompt still counts as prefill here and may reach past
    the end of the slot's row. The kernel then reads the next slot's tokens, which the draft tokens
    overwrite later; this function copies only the tokens that the row has.
    """
    slots = idx_mapping_ptr.numpy()
    computed = num_computed_tokens_ptr.numpy()[slots]
    starts, tokens = query_start_loc_ptr.numpy(), all_token_ids_ptr.numpy()
    input_ids = input_ids_ptr.numpy()
    for i in np.flatnonzero(computed < prefill_lens_ptr.numpy()[slots]).tolist():
        start, end = starts[i], starts[i + 1]
        run = tokens[slots[i], computed[i] : computed[i] + end - start]
        input_ids[start : start + len(run)] = run


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
    starts, positions = query_start_loc_ptr.tolist(), pos_ptr.numpy()
    seq_lens, computed = seq_lens_ptr.numpy(), num_computed_tokens_ptr.numpy()
    for i, slot in enumerate(idx_mapping_ptr.tolist()):
        start, end, first = starts[i], starts[i + 1], int(computed[slot])
        seq_lens[i] = first + end - start
        positions[start:end] = np.arange(first, first + end - start)
    seq_lens[grid[0] - 1 : max_num_reqs] = 0


def combine_sampled_and_draft_tokens(
    grid: Grid,  # (R,)
    input_ids_ptr: Tensor,  # [>= T]
    idx_mapping_ptr: Tensor,  # [R]
    query_start_loc_ptr: Tensor,  # [R + 1]
    seq_lens_ptr: Tensor,  # [R]
    prefill_len_ptr: Tensor,  # [S]
    draft_tokens_ptr: Tensor,  # [S, L]
    cu_num_logits_ptr: Tensor,  # [R + 1]
    logits_indices_ptr: Tensor,  # [N]
    NUM_NEW_SAMPLED_TOKENS: int,
) -> None:
    """Write which rows get logits, and the input ids of the canvases, which are draft tokens."""
    assert NUM_NEW_SAMPLED_TOKENS == 0  # no token comes before the drafts
    slots, limits = idx_mapping_ptr.tolist(), prefill_len_ptr.numpy()
    seq_lens, ends = seq_lens_ptr.tolist(), query_start_loc_ptr.tolist()[1:]
    cu = cu_num_logits_ptr.tolist()
    input_ids, indices = input_ids_ptr.numpy(), logits_indices_ptr.numpy()
    drafts = draft_tokens_ptr.numpy()
    for i, slot in enumerate(slots):
        length = cu[i + 1] - cu[i]
        start, end = ends[i] - length, ends[i]
        indices[cu[i] : cu[i + 1]] = np.arange(start, end)
        if seq_lens[i] > limits[slot]:  # otherwise all of them are in the prompt
            input_ids[start:end] = drafts[slot, :length]


def post_update(
    grid: Grid,  # (R,)
    idx_mapping_ptr: Tensor,  # [R]; rows with a negative entry are skipped
    num_computed_tokens_ptr: Tensor,  # [S]
    last_sampled_tokens_ptr: Tensor,  # [S, 1] or [S]
    output_bin_counts_ptr: Tensor | None,  # for penalties
    sampled_tokens_ptr: Tensor,  # [R, L]
    num_sampled_ptr: Tensor,  # [R]
    num_rejected_ptr: Tensor,  # [R]
    query_start_loc_ptr: Tensor | None,  # [R + 1]
    all_token_ids_ptr: Tensor,  # [S, max_model_len]
    total_len_ptr: Tensor,  # [S]
    draft_tokens_ptr: Tensor | None = None,  # [R, drafts]; this and the next since vLLM 0.33
    draft_tokens_out_ptr: Tensor | None = None,  # [S, drafts]
) -> None:
    """Append the sampled tokens to each request and advance its computed length.

    A last canvas may end past max_model_len. The kernel then writes into the next slot's row. This
    function drops the surplus tokens, but counts lengths as the kernel does.
    """
    assert output_bin_counts_ptr is None
    rejected, starts = num_rejected_ptr.tolist(), None
    if query_start_loc_ptr is not None:
        starts = query_start_loc_ptr.tolist()
    computed, total = num_computed_tokens_ptr.numpy(), total_len_ptr.numpy()
    last, sampled = last_sampled_tokens_ptr.view(-1).numpy(), sampled_tokens_ptr.numpy()
    tokens, num_sampled = all_token_ids_ptr.numpy(), num_sampled_ptr.tolist()
    for i, slot in enumerate(idx_mapping_ptr.tolist()):
        if slot < 0:
            continue
        if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
            draft_tokens_out_ptr[slot] = draft_tokens_ptr[i]
        if num_sampled[i]:
            run, begin = sampled[i, : num_sampled[i]], int(total[slot])
            last[slot] = run[-1]
            total[slot] += len(run)
            room = tokens[slot, begin : begin + len(run)]
            room[:] = run[: len(room)]
        computed[slot] += (0 if starts is None else starts[i + 1] - starts[i]) - rejected[i]


def post_update_num_computed_tokens(
    grid: Grid,  # (R,)
    idx_mapping_ptr: Tensor,  # [R]
    num_computed_tokens_ptr: Tensor,  # [S]
    query_start_loc_ptr: Tensor,  # [R + 1]
) -> None:
    """Advance every request by its query length, in a pipeline stage that is not the last."""
    lengths = np.diff(query_start_loc_ptr.numpy()[: grid[0] + 1])
    num_computed_tokens_ptr.numpy()[idx_mapping_ptr.numpy()] += lengths


def expand_idx_mapping(
    grid: Grid,  # (R,)
    idx_mapping_ptr: Tensor,  # [R]
    expanded_idx_mapping_ptr: Tensor,  # [N]
    expanded_local_pos_ptr: Tensor,  # [N]
    cu_num_logits_ptr: Tensor,  # [R + 1]
) -> None:
    """Write for every row of logits its request's slot and its index within the request."""
    slots, positions = expanded_idx_mapping_ptr.numpy(), expanded_local_pos_ptr.numpy()
    start = 0
    ends = cu_num_logits_ptr.tolist()[1:]
    for slot, end in zip(idx_mapping_ptr.tolist(), ends, strict=True):
        slots[start:end] = slot
        positions[start:end] = np.arange(end - start)
        start = end


def topk_log_softmax(
    grid: Grid,  # (N,)
    output_ptr: Tensor,  # float32 [N, K]
    logits_ptr: Tensor,  # [N, V], which may be bfloat16
    topk_ids_ptr: Tensor,  # [N, K]
) -> None:
    """Log-softmax at the given token ids, in float32."""
    output_ptr.copy_(logits_ptr.float().log_softmax(1).gather(1, topk_ids_ptr))


def ranks(
    grid: Grid,  # (N,)
    output_ptr: Tensor,  # int64 [N]
    logits_ptr: Tensor,  # [N, V]
    token_ids_ptr: Tensor,  # [N]
) -> None:
    """How many logits of a row are at least as large as the chosen one; 1 for the largest."""
    chosen = logits_ptr.gather(1, token_ids_ptr[:, None])
    output_ptr.copy_((logits_ptr >= chosen).sum(1))


def fill_logprob_token_ids(
    grid: Grid,  # (N,)
    out_token_ids_ptr: Tensor,  # int64 [N, 1 + columns]
    out_valid_mask_ptr: Tensor,  # bool [N, 1 + columns]
    sampled_token_ids_ptr: Tensor,  # [N]
    topk_indices_ptr: Tensor,  # [N, NUM_TOPK]; unread when NUM_TOPK is 0
    expanded_idx_mapping_ptr: Tensor,  # [N]
    num_per_req_token_ids_ptr: Tensor,  # [S]
    per_req_token_ids_ptr: Tensor,  # [S, most ids a request may name]
    NUM_TOPK: int,
) -> None:
    """Write the token ids to score: the sampled one, then the request's own list or the top k."""
    out_token_ids_ptr[:, 0] = sampled_token_ids_ptr
    out_valid_mask_ptr[:, 0] = True
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        own = int(num_per_req_token_ids_ptr[slot])
        ids = per_req_token_ids_ptr[slot, :own] if own else topk_indices_ptr[row, :NUM_TOPK]
        out_token_ids_ptr[row, 1 : 1 + len(ids)] = ids
        out_valid_mask_ptr[row, 1 : 1 + len(ids)] = True
