"""Wraps vLLM's head of a model as the `Head` from which row statistics are computed."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_dllm.ops.statistics.head import Head, Shard, logits_of


def tiled_head(
    lm_head: Any,
    vocabulary: int,
    embedding: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> Head:
    """This rank's part of a head.

    Args:
        lm_head: vLLM's parallel head.
        vocabulary: number of ids of all ranks together.
        embedding: ``[ids or more, hidden]``, this rank's rows for soft embeddings, or None.
        soft_cap: logits become ``cap * tanh(logit / cap)``, in float32; None for none.
    """
    if not is_plain(lm_head):
        raise ValueError(
            "a quantized lm_head cannot be computed by tiles; leave lm_head out of the "
            "quantization, or set dllm.kernels=torch (LLaDA2), VLLM_DLLM_NATIVE=1 (DiffusionGemma)"
        )
    own = lm_head.shard_indices
    first, end = own.org_vocab_start_index, own.org_vocab_end_index
    # vLLM pads the rows of its embeddings.
    weight = lm_head.weight[: max(0, end - first)]
    shard = None
    if get_tensor_model_parallel_world_size() > 1:

        def gather(part: torch.Tensor) -> torch.Tensor:  # [...] of all ranks -> [ranks, ...]
            return tensor_model_parallel_all_gather(part[None].contiguous(), dim=0)

        width = lm_head.num_embeddings_per_partition
        shard = Shard(first, end, width, gather, tensor_model_parallel_all_reduce)
    return Head(
        logits_of(weight, soft_cap),
        vocabulary,
        None if embedding is None else embedding[: len(weight)],
        shard,
        weight=weight,
        soft_cap=soft_cap,
    )


def is_plain(lm_head: Any) -> bool:
    """Whether vLLM's head is a matrix that was not quantized."""
    return isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
