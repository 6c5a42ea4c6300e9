"""Stores keys and values in the paged cache; vLLM's Triton backend has a kernel only for GPUs."""

from __future__ import annotations

import torch


def store_keys_and_values(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write a step's keys and values into the cache.

    Args:
        key: ``[n, KV heads, head size]``, with n at least the number of tokens.
        value: the same shape as `key`.
        kv_cache: ``[pages, KV heads, page size, 2 * head size]``, keys before values.
        slot_mapping: int64 ``[tokens]``, page * page size + slot in the page; -1 for padding.

    Raises:
        ValueError: the dtypes of the cache and the keys differ.
    """
    if kv_cache.dtype != key.dtype:
        raise ValueError(f"no {kv_cache.dtype} KV cache for {key.dtype} keys on this platform")
    real = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[real]
    page, slot = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache.transpose(1, 2)[page, slot] = torch.cat([key[real], value[real]], -1)
