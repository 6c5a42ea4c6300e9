"""Stand-ins for the log-probability kernels of `vllm.v1.worker.gpu.sample.logprob`.

They read whole rows of logits, which may be bfloat16, so they use torch and not numpy. Like the
kernels, they never hold a float32 copy of all rows: they take a few rows at a time.

Notation: N = rows of logits, V = vocabulary, K = token ids per row, S = slots.
"""

# Arguments keep the kernels' names, including capitals.
# ruff: noqa: N803

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from vllm_cpu_v2.table_kernels import Grid

# The number of logits handled at once: 4 MiB in float32, which stays in a CPU's cache.
_CHUNK = 1 << 20


def _chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices of rows, each of about `_CHUNK` elements."""
    step = max(1, _CHUNK // max(1, width))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def topk_log_softmax(
    grid: Grid,  # (N,)
    output_ptr: Tensor,  # float32 [N, K]
    logits_ptr: Tensor,  # [N, V]
    topk_ids_ptr: Tensor,  # [N, >= K]
    topk: int,
    vocab_size: int,
) -> None:
    """Log-softmax at the given token ids, in float32 and in the kernel's order of operations."""
    count = grid[0]
    ids = topk_ids_ptr[:count, :topk]
    for rows in _chunks(count, vocab_size):
        logits = logits_ptr[rows, :vocab_size].float()
        top = logits.amax(dim=1, keepdim=True)
        log_sum = (logits - top).exp_().sum(dim=1, keepdim=True).log_()
        output_ptr[rows] = logits.gather(1, ids[rows].long()) - top - log_sum


def ranks(
    grid: Grid,  # (N,)
    output_ptr: Tensor,  # int64 [N]
    logits_ptr: Tensor,  # [N, V]
    token_ids_ptr: Tensor,  # [N]
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """How many logits of a row are at least as large as the chosen one; 1 for the largest.

    The kernel fills its last tile with minus infinity, and counts that filling as well if the
    chosen logit is minus infinity. This function does the same, so that CPU and GPU agree.
    """
    count = grid[0]
    filling = -vocab_size % BLOCK_SIZE
    out = output_ptr.numpy()
    chosen = token_ids_ptr[:count, None].long()
    for rows in _chunks(count, vocab_size):
        logits = logits_ptr[rows, :vocab_size]
        bound = logits.gather(1, chosen[rows])
        # numpy counts booleans several times faster than a torch sum to int64
        out[rows] = np.count_nonzero((logits >= bound).numpy(), axis=1)
        out[rows] += filling * bound.isneginf()[:, 0].numpy()


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
    PADDED_COLS: int,
) -> None:
    """Write the token ids to score: the sampled one, then the request's own list or the top k."""
    count = grid[0]
    ids, valid = out_token_ids_ptr.numpy(), out_valid_mask_ptr.numpy()
    ids[:count, 0] = sampled_token_ids_ptr.numpy()[:count]
    valid[:count, 0] = True
    slots = expanded_idx_mapping_ptr.numpy()[:count]
    own = num_per_req_token_ids_ptr.numpy()[slots]
    if NUM_TOPK > 0:
        plain = own <= 0
        width = min(NUM_TOPK, PADDED_COLS)
        ids[:count, 1 : 1 + width][plain] = topk_indices_ptr.numpy()[:count, :width][plain]
        valid[:count, 1 : 1 + width][plain] = True
    listed = per_req_token_ids_ptr.numpy()
    for row in np.flatnonzero(own > 0).tolist():
        width = min(int(own[row]), PADDED_COLS)
        ids[row, 1 : 1 + width] = listed[slots[row], :width]
        valid[row, 1 : 1 + width] = True
