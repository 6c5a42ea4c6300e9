"""numpy stand-ins for the kernels that write tables: staged writes, block tables, slot mappings.

A kernel gets the block tables of several KV cache groups as raw addresses (`data_ptr()` in a uint64
tensor), with a row stride for each, so these functions copy by address instead of by tensor.
`batch_kernels` says how stand-ins are called and what the letters in the shape comments mean.
"""

# Arguments keep the kernels' names, including capitals.
# ruff: noqa: N803

import ctypes

import numpy as np
from torch import Tensor

Grid = tuple[int, ...]

_INT32: np.dtype = np.dtype(np.int32)


def flat_view(tensor: Tensor) -> np.ndarray:
    """One-dimensional view of a contiguous tensor.

    Raises:
        ValueError: the tensor is not contiguous, so writes would go to a copy.
    """
    array = tensor.numpy()
    if not array.flags.c_contiguous:
        raise ValueError("this stand-in writes through a flat view and needs contiguous memory")
    return array.reshape(-1)


def _int32_at(address: int, length: int) -> np.ndarray:
    """View `length` int32 values at a raw address."""
    return np.frombuffer((ctypes.c_int32 * length).from_address(address), dtype=_INT32)


def apply_write(
    grid: Grid,
    output_ptr: Tensor,  # [rows, width] or [rows]; MULTI_GROUP: addresses, uint64 [G]
    output_stride: int | Tensor,  # row stride; MULTI_GROUP: [G]
    write_indices_ptr: Tensor,  # [writes]
    write_starts_ptr: Tensor,  # [writes]
    write_contents_ptr: Tensor,  # [sum of lengths]
    write_cu_lens_ptr: Tensor,  # [writes], running sum of the lengths
    write_group_ids_ptr: Tensor | None,  # [writes], only with MULTI_GROUP
    MULTI_GROUP: bool,
) -> None:
    """Copy every staged run of values to (row, start) of its table."""
    count = grid[0]
    rows = write_indices_ptr.numpy()[:count].tolist()
    starts = write_starts_ptr.numpy()[:count].tolist()
    ends = write_cu_lens_ptr.numpy()[:count].tolist()
    contents = write_contents_ptr.numpy()
    begin = 0
    if not MULTI_GROUP:
        assert isinstance(output_stride, int)
        flat = flat_view(output_ptr)
        for row, start, end in zip(rows, starts, ends, strict=True):
            destination = row * output_stride + start
            flat[destination : destination + end - begin] = contents[begin:end]
            begin = end
        return
    assert isinstance(output_stride, Tensor) and write_group_ids_ptr is not None
    # Tables of several groups are known only by address, and all hold int32.
    if contents.dtype != _INT32:
        raise TypeError(f"grouped writes carry int32, got {contents.dtype}")
    bases, strides = output_ptr.tolist(), output_stride.tolist()
    source = contents.ctypes.data
    groups = write_group_ids_ptr.numpy()[:count].tolist()
    for group, row, start, end in zip(groups, rows, starts, ends, strict=True):
        destination = bases[group] + 4 * (row * strides[group] + start)
        ctypes.memmove(destination, source + 4 * begin, 4 * (end - begin))
        begin = end


def gather_block_tables(
    grid: Grid,  # (G, R after padding)
    batch_idx_to_req_idx: Tensor,  # [R]
    src_block_table_ptrs: Tensor,  # uint64 [G], each the address of int32 [S, stride]
    dst_block_table_ptrs: Tensor,  # uint64 [G], each the address of int32 [S, stride]
    block_table_strides: Tensor,  # [G]
    num_blocks_ptr: Tensor,  # [G, S]
    num_reqs: int,
    num_computed_tokens_ptr: Tensor | None = None,  # [S]
    sliding_window_reach_ptr: Tensor | None = None,  # [G], tokens; 0 without a window
    block_sizes_ptr: Tensor | None = None,  # [G]
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Put the batch's block-table rows in batch order and zero the padding rows.

    As in the kernel, a row is written up to its number of blocks; the rest is stale and never
    read. With `MASK_SLIDING_WINDOW`, pages that end before the first token that the step's
    first query can see are replaced by the null page, 0.
    """
    slots = batch_idx_to_req_idx.numpy()[:num_reqs].tolist()
    tables = zip(
        src_block_table_ptrs.tolist(),
        dst_block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        num_blocks_ptr.numpy(),
        strict=True,
    )
    memmove = ctypes.memmove
    for source, target, stride, num_blocks in tables:
        row_bytes = 4 * stride
        for row, slot in enumerate(slots[: grid[1]]):
            memmove(target + row * row_bytes, source + slot * row_bytes, 4 * int(num_blocks[slot]))
        if grid[1] > num_reqs:
            ctypes.memset(target + num_reqs * row_bytes, 0, (grid[1] - num_reqs) * row_bytes)
    if MASK_SLIDING_WINDOW:
        assert sliding_window_reach_ptr is not None and block_sizes_ptr is not None
        assert num_computed_tokens_ptr is not None
        computed = num_computed_tokens_ptr.numpy()[slots[: grid[1]]]
        for target, stride, reach, size in zip(
            dst_block_table_ptrs.tolist(),
            block_table_strides.tolist(),
            sliding_window_reach_ptr.tolist(),
            block_sizes_ptr.tolist(),
            strict=True,
        ):
            unseen = np.maximum(computed - reach, 0) // size if reach else ()
            for row, count in enumerate(unseen):
                ctypes.memset(target + 4 * row * stride, 0, 4 * int(count))


def _local_positions(
    positions: np.ndarray, block_size: int, rank: int, size: int, interleave: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each token's position in the cache of this context-parallel rank, and whether it is there."""
    block, offset = np.divmod(positions, block_size * size)
    is_local = offset // interleave % size == rank
    local_offset = offset // (interleave * size) * interleave + offset % interleave
    return block * block_size + local_offset, is_local


def compute_slot_mappings(
    grid: Grid,  # (G, R + 1): the last program of a group pads
    max_num_tokens: int,
    idx_mapping: Tensor,  # [R]; -1 marks a dummy request, which owns no blocks
    query_start_loc: Tensor,  # [R + 1]
    pos: Tensor,  # [T]
    block_table_ptrs: Tensor,  # uint64 [G], each the address of int32 [S, stride]
    block_table_strides: Tensor,  # [G]
    block_sizes: Tensor,  # [G]
    slot_mapping_enabled: Tensor,  # bool [G]
    dcp_sharded: Tensor,  # bool [G]
    slot_mappings_ptr: Tensor,  # [G, max_num_tokens]
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
) -> None:
    """Write every token's slot in the KV cache, and `PAD_ID` where there is none."""
    num_reqs = grid[1] - 1
    starts = query_start_loc.numpy()[: num_reqs + 1]
    first, last = int(starts[0]), int(starts[num_reqs])
    slots = idx_mapping.numpy()[:num_reqs]
    token_slots: np.ndarray = np.repeat(slots, np.diff(starts))  # [T]
    dummy = token_slots < 0 if num_reqs and slots.min() < 0 else None
    if dummy is not None:
        token_slots[dummy] = 0  # any readable row will do: PAD_ID replaces the result below
    positions = pos.numpy()[first:last]
    rows = int(slots.max(initial=0)) + 1
    out = slot_mappings_ptr.numpy()
    bases, strides = block_table_ptrs.tolist(), block_table_strides.tolist()
    sizes, enabled = block_sizes.tolist(), slot_mapping_enabled.tolist()
    for group in range(grid[0]):
        out[group, last:max_num_tokens] = PAD_ID
        if not enabled[group]:
            out[group, first:last] = PAD_ID
            continue
        local, skip = positions, dummy
        if CP_SIZE != 1 and bool(dcp_sharded[group]):
            local, is_local = _local_positions(
                positions, sizes[group], cp_rank, CP_SIZE, CP_INTERLEAVE
            )
            skip = ~is_local if dummy is None else ~is_local | dummy
        block = local // sizes[group]
        table = _int32_at(bases[group], rows * strides[group])
        entry = token_slots * strides[group] + block
        if skip is not None:
            entry[skip] = 0  # tokens of other ranks or without a request have no entry
        # block number * size + (local - block * size), with one multiplication fewer
        ids = (table[entry] - block) * sizes[group] + local
        if skip is not None:
            ids[skip] = PAD_ID
        out[group, first:last] = ids
