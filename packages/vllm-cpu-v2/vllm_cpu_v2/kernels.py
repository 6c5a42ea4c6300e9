"""CPU stand-ins for the Triton kernels with which Model Runner V2 maintains its batch.

Each function takes the launch grid and then the arguments of the Triton kernel, under the kernel's
own names; `launch.KernelStandIn` binds them. Tensors come as numpy arrays that share the memory
which the kernel would have written. The block tables of several KV cache groups come as raw
addresses (`data_ptr()` in a uint64 tensor) with a row stride for each.

Most functions are loops that numba compiles (`compiled_loops`). After a forward pass nothing of a
step is in the processor's caches: a compiled loop is one short piece of code, while each operator
of numpy or torch is code of its own, which has to be fetched.

The functions do what diffusion models need, and assert that they are not asked for more.

Notation in the shape comments: R = requests in the batch, S = slots (`max_num_reqs`),
T = tokens in the batch, G = KV cache groups, L = length of a canvas, N = rows of logits,
V = vocabulary, K = token ids per row.
"""

# Arguments keep the kernels' names, including capitals. numba's decorator has no types.
# ruff: noqa: N803
# mypy: disallow-untyped-decorators=False

import ctypes

from numpy import ndarray
from torch import Tensor

from vllm_cpu_v2.compiled_loops import compiled, table_row

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


@compiled
def gather_block_tables(
    grid: Grid,  # (G, R after padding)
    batch_idx_to_req_idx: ndarray,  # [R]
    src_block_table_ptrs: ndarray,  # uint64 [G], each the address of int32 [S, stride]
    dst_block_table_ptrs: ndarray,  # uint64 [G], each the address of int32 [S, stride]
    block_table_strides: ndarray,  # [G]
    num_blocks_ptr: ndarray,  # [G, S]
    num_reqs: int,
    num_computed_tokens_ptr: ndarray | None = None,  # [S]; this and the rest since vLLM 0.33
    sliding_window_reach_ptr: ndarray | None = None,  # [G], tokens; 0 without a window
    block_sizes_ptr: ndarray | None = None,  # [G]
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Put the batch's block-table rows in batch order and zero the padding rows.

    As in the kernel, a row is written up to its number of blocks; the rest is stale and never read.
    With `MASK_SLIDING_WINDOW`, pages that end before the first token that the step's first query
    can see are replaced by the null page, 0.
    """
    for group in range(grid[0]):
        stride = block_table_strides[group]
        for row in range(grid[1]):
            target = table_row(dst_block_table_ptrs[group], stride, row)
            if row >= num_reqs:
                for page in range(stride):
                    target[page] = 0
                continue
            slot, unseen = batch_idx_to_req_idx[row], 0
            if (
                num_computed_tokens_ptr is not None
                and sliding_window_reach_ptr is not None
                and block_sizes_ptr is not None
                and MASK_SLIDING_WINDOW
            ):
                reach = sliding_window_reach_ptr[group]
                if reach > 0:
                    unseen = (num_computed_tokens_ptr[slot] - reach) // block_sizes_ptr[group]
            source = table_row(src_block_table_ptrs[group], stride, slot)
            for page in range(num_blocks_ptr[group, slot]):
                target[page] = source[page] if page >= unseen else 0


@compiled
def compute_slot_mappings(
    grid: Grid,  # (G, R + 1): the last program of a group pads
    max_num_tokens: int,
    idx_mapping: ndarray,  # [R]
    query_start_loc: ndarray,  # [R + 1]
    pos: ndarray,  # [T], consecutive within a request
    block_table_ptrs: ndarray,  # uint64 [G], each the address of int32 [S, stride]
    block_table_strides: ndarray,  # [G]
    block_sizes: ndarray,  # [G]
    slot_mapping_enabled: ndarray,  # bool [G]
    slot_mappings_ptr: ndarray,  # [G, max_num_tokens]
    CP_SIZE: int,
    PAD_ID: int,
) -> None:
    """Write every token's slot in the KV cache, and `PAD_ID` where there is no token."""
    assert CP_SIZE == 1
    for group in range(grid[0]):
        assert slot_mapping_enabled[group]
        slot_ids, size = slot_mappings_ptr[group], block_sizes[group]
        for row in range(grid[1] - 1):
            blocks = table_row(
                block_table_ptrs[group], block_table_strides[group], idx_mapping[row]
            )
            for token in range(query_start_loc[row], query_start_loc[row + 1]):
                slot_ids[token] = blocks[pos[token] // size] * size + pos[token] % size
        slot_ids[query_start_loc[grid[1] - 1] : max_num_tokens] = PAD_ID


@compiled
def prepare_prefill_inputs(
    grid: Grid,  # (R,)
    input_ids_ptr: ndarray,  # [>= T]
    idx_mapping_ptr: ndarray,  # [R]
    query_start_loc_ptr: ndarray,  # [R + 1]
    all_token_ids_ptr: ndarray,  # [S, max_model_len]
    prefill_lens_ptr: ndarray,  # [S]
    num_computed_tokens_ptr: ndarray,  # [S]
) -> None:
    """Copy the prompt tokens of this step.

    The kernel also copies the tokens that follow them, which only a speculator reads.

    A canvas that was rolled back into the prompt still counts as prefill here and may reach past
    the end of the slot's row. The kernel then reads the next slot's tokens, which the draft tokens
    overwrite later; this function copies only the tokens that the row has.
    """
    for row in range(grid[0]):
        slot, start = idx_mapping_ptr[row], query_start_loc_ptr[row]
        computed = num_computed_tokens_ptr[slot]
        if computed < prefill_lens_ptr[slot]:
            tokens = all_token_ids_ptr[slot, computed:]
            for token in range(min(query_start_loc_ptr[row + 1] - start, len(tokens))):
                input_ids_ptr[start + token] = tokens[token]


@compiled
def prepare_pos_seq_lens(
    grid: Grid,  # (R + 1,): the last program pads
    pos_ptr: ndarray,  # [>= T]
    seq_lens_ptr: ndarray,  # [S]
    idx_mapping_ptr: ndarray,  # [R]
    query_start_loc_ptr: ndarray,  # [R + 1]
    num_computed_tokens_ptr: ndarray,  # [S]
    max_num_reqs: int,
) -> None:
    """Write positions of the batch's tokens, sequence lengths, and 0 for unused rows."""
    requests = grid[0] - 1
    for row in range(requests):
        start, end = query_start_loc_ptr[row], query_start_loc_ptr[row + 1]
        computed = num_computed_tokens_ptr[idx_mapping_ptr[row]]
        seq_lens_ptr[row] = computed + end - start
        for token in range(start, end):
            pos_ptr[token] = computed + token - start
    seq_lens_ptr[requests:max_num_reqs] = 0


@compiled
def combine_sampled_and_draft_tokens(
    grid: Grid,  # (R,)
    input_ids_ptr: ndarray,  # [>= T]
    idx_mapping_ptr: ndarray,  # [R]
    query_start_loc_ptr: ndarray,  # [R + 1]
    seq_lens_ptr: ndarray,  # [R]
    prefill_len_ptr: ndarray,  # [S]
    draft_tokens_ptr: ndarray,  # [S, L]
    cu_num_logits_ptr: ndarray,  # [R + 1]
    logits_indices_ptr: ndarray,  # [N]
    NUM_NEW_SAMPLED_TOKENS: int,
) -> None:
    """Write which rows get logits, and the input ids of the canvases, which are draft tokens."""
    assert NUM_NEW_SAMPLED_TOKENS == 0  # no token comes before the drafts
    for row in range(grid[0]):
        slot, first = idx_mapping_ptr[row], cu_num_logits_ptr[row]
        length = cu_num_logits_ptr[row + 1] - first
        start = query_start_loc_ptr[row + 1] - length
        is_canvas = seq_lens_ptr[row] > prefill_len_ptr[slot]  # otherwise it is in the prompt
        for place in range(length):
            logits_indices_ptr[first + place] = start + place
            if is_canvas:
                input_ids_ptr[start + place] = draft_tokens_ptr[slot, place]


@compiled
def post_update(
    grid: Grid,  # (R,)
    idx_mapping_ptr: ndarray,  # [R]; rows with a negative entry are skipped
    num_computed_tokens_ptr: ndarray,  # [S]
    last_sampled_tokens_ptr: ndarray,  # [S, 1] or [S]
    output_bin_counts_ptr: ndarray | None,  # for penalties
    sampled_tokens_ptr: ndarray,  # [R, L]
    num_sampled_ptr: ndarray,  # [R]
    num_rejected_ptr: ndarray,  # [R]
    query_start_loc_ptr: ndarray | None,  # [R + 1]
    all_token_ids_ptr: ndarray,  # [S, max_model_len]
    total_len_ptr: ndarray,  # [S]
    draft_tokens_ptr: ndarray | None = None,  # [R, drafts]; this and the next since vLLM 0.33
    draft_tokens_out_ptr: ndarray | None = None,  # [S, drafts]
) -> None:
    """Append the sampled tokens to each request and advance its computed length.

    A last canvas may end past max_model_len. The kernel then writes into the next slot's row. This
    function drops the surplus tokens, but counts lengths as the kernel does.
    """
    assert output_bin_counts_ptr is None
    last_sampled = last_sampled_tokens_ptr.reshape(-1)
    for row in range(grid[0]):
        slot = idx_mapping_ptr[row]
        if slot < 0:
            continue
        if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
            draft_tokens_out_ptr[slot] = draft_tokens_ptr[row]
        count, begin = num_sampled_ptr[row], total_len_ptr[slot]
        if count > 0:
            last_sampled[slot] = sampled_tokens_ptr[row, count - 1]
            for place in range(min(count, all_token_ids_ptr.shape[1] - begin)):
                all_token_ids_ptr[slot, begin + place] = sampled_tokens_ptr[row, place]
            total_len_ptr[slot] = begin + count
        if query_start_loc_ptr is not None:
            read = query_start_loc_ptr[row + 1] - query_start_loc_ptr[row]
            num_computed_tokens_ptr[slot] += read
        num_computed_tokens_ptr[slot] -= num_rejected_ptr[row]


@compiled
def post_update_num_computed_tokens(
    grid: Grid,  # (R,)
    idx_mapping_ptr: ndarray,  # [R]
    num_computed_tokens_ptr: ndarray,  # [S]
    query_start_loc_ptr: ndarray,  # [R + 1]
) -> None:
    """Advance every request by its query length, in a pipeline stage that is not the last."""
    for row in range(grid[0]):
        length = query_start_loc_ptr[row + 1] - query_start_loc_ptr[row]
        num_computed_tokens_ptr[idx_mapping_ptr[row]] += length


@compiled
def expand_idx_mapping(
    grid: Grid,  # (R,)
    idx_mapping_ptr: ndarray,  # [R]
    expanded_idx_mapping_ptr: ndarray,  # [N]
    expanded_local_pos_ptr: ndarray,  # [N]
    cu_num_logits_ptr: ndarray,  # [R + 1]
) -> None:
    """Write for every row of logits its request's slot and its index within the request."""
    for row in range(grid[0]):
        start = cu_num_logits_ptr[row]
        for place in range(cu_num_logits_ptr[row + 1] - start):
            expanded_idx_mapping_ptr[start + place] = idx_mapping_ptr[row]
            expanded_local_pos_ptr[start + place] = place


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
