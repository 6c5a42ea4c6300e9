"""Keys and values into pages, where vLLM's Triton backend has only a kernel for GPUs."""

from __future__ import annotations

import torch


def store(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write a step's keys and values into the cache.

    Args:
        key: ``[tokens or more, KV heads, head size]``.
        value: the same.
        kv_cache: ``[pages, KV heads, page size, 2 * head size]``.
        slot_mapping: int64 ``[tokens]``, page times page size plus slot; -1 for padding.

    Raises:
        ValueError: the cache has another dtype than the keys.
    """
    if kv_cache.dtype != key.dtype:
        raise ValueError(f"no {kv_cache.dtype} KV cache for {key.dtype} keys on this platform")
    real = (slot_mapping >= 0).nonzero()[:, 0]
    at = slot_mapping[real]
    page, slot = at // kv_cache.shape[2], at % kv_cache.shape[2]
    kv_cache.transpose(1, 2)[page, slot] = torch.cat([key[real], value[real]], -1)
