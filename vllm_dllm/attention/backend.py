"""This package's attention kernel as a backend of vLLM: ``--attention-backend CUSTOM``.

Keys and values are stored as vLLM's Triton backend stores them. The attention itself is
`ops.attention.launch_triton`; `MaskRules` provides its mask rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.attention.routes import KV_CACHE_DTYPES
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import MaskRule


@dataclass(frozen=True)
class MaskMetadata:
    """A step's requests, for the layers of a KV cache group."""

    num_actual_tokens: int  # the number of tokens in the batch, without padding
    slot_mapping: torch.Tensor  # where the batch's keys and values are stored
    queries: QueryBatch  # the requests. `MaskRules` fills in their rules.


class MaskMetadataBuilder(AttentionMetadataBuilder[MaskMetadata]):
    """Builds `MaskMetadata` from vLLM's batch; uniform batches may be captured into CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not hasattr(vllm_config.model_config, "dllm"):  # set if this package's start-up has run
            raise ValueError(
                "--attention-backend CUSTOM (vllm-dllm) is for block-diffusion models that this "
                "package serves; remove it"
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MaskMetadata:
        """See vLLM's class."""
        common = common_attn_metadata
        if common.mm_req_doc_ranges:
            raise NotImplementedError(
                "attention backend CUSTOM (vllm-dllm): image tokens that see each other"
            )
        queries = QueryBatch(
            query_start=common.query_start_loc,
            seq_lens=common.seq_lens,
            page_table=common.block_table_tensor,
            rule=MaskRule(None, None),
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )
        return MaskMetadata(common.num_actual_tokens, common.slot_mapping, queries)


class MaskAttentionBackend(TritonAttentionBackend):
    """vLLM's Triton backend with this package's attention kernel."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The only name that vLLM has for third-party backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MaskAttentionImpl]:
        """See vLLM's class."""
        return MaskAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MaskMetadataBuilder]:
        """See vLLM's class."""
        return MaskMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the kernel supports the head size."""
        return 32 <= head_size <= 512

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Only decoder attention in a paged cache is supported."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """VLLM asks for this if a checkpoint says that images may see each other.

        DiffusionGemma's say so, but no model state passes such ranges on: images are causal, like
        the rest of a prompt. The metadata builder refuses ranges.
        """
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Not supported: how the kernel splits keys depends on the batch."""
        return False


class MaskAttentionImpl(TritonAttentionImpl):
    """One layer: vLLM's code writes the cache, and this package's kernel reads it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM would pass float8 queries; the kernel needs them in the model's precision.
        self.supports_quant_query_input = False
        if self.alibi_slopes is not None or self.chunk_lookback >= 0:
            raise ValueError(
                "attention backend CUSTOM (vllm-dllm) has neither ALiBi nor attention chunks"
            )
        self.layer = AttentionLayer(
            scale=self.scale,
            window_width=max(0, self.sliding_window[0] + 1),
            soft_cap=float(self.logits_soft_cap),
            sinks=self.sinks,
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """See vLLM's class."""
        return False

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See vLLM's class."""
        if key.device.type == "cpu":
            store_keys_and_values(key, value, kv_cache, slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: MaskMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See vLLM's class; shapes ``[tokens, heads, head size]``."""
        # Imported here, because this module must load even without Triton, so that its backend can
        # be refused with a message.
        from vllm_dllm.ops.attention.launch_triton import paged_attention

        if attn_metadata is None:
            return output.fill_(0)  # vLLM is profiling memory
        tokens = attn_metadata.num_actual_tokens
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, -1)
        pages = PagedKV(keys, values)
        if is_quantized_kv_cache(self.kv_cache_dtype):
            pages = PagedKV(
                keys.view(self.fp8_dtype),
                values.view(self.fp8_dtype),
                layer._k_scale,
                layer._v_scale,
            )
        paged_attention(query[:tokens], pages, attn_metadata.queries, self.layer, output[:tokens])
        return output


def store_keys_and_values(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write a step's keys and values into the cache; vLLM's kernel for that needs a GPU.

    Keys and values are ``[n, KV heads, head size]``, with n at least the number of tokens. The
    cache is ``[pages, KV heads, page size, 2 * head size]``, keys before values, and `slot_mapping`
    is int64 ``[tokens]``, page * page size + slot in the page; -1 for padding.

    Raises:
        ValueError: the dtypes of the cache and the keys differ.
    """
    if kv_cache.dtype != key.dtype:
        raise ValueError(f"no {kv_cache.dtype} KV cache for {key.dtype} keys on this platform")
    real = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[real]
    page, slot = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache.transpose(1, 2)[page, slot] = torch.cat([key[real], value[real]], -1)


class MaskRules:
    """An `AttentionRule` for this backend: one mask rule for each request of a batch.

    The tensors of `rule` (int32 ``[rows]``, initially causal) persist, for full CUDA graphs; `fill`
    writes the rules of a batch there before each step, unless they never change.
    """

    graph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        rows: int,
        device: torch.device,
        fill: Callable[[AttentionBatch, MaskRule], None] | None = None,
    ) -> None:
        self.fill = fill
        block, window = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        self.rule = MaskRule(block.fill_(1), window)

    def metadata(self, batch: AttentionBatch) -> dict[str, Any]:
        """See `AttentionRule`."""
        if self.fill is not None:
            self.fill(batch, self.rule)
        rule = MaskRule(self.rule.block[: batch.rows], self.rule.window[: batch.rows])
        metadata = batch.one_query_per_request(causal=False)
        # Layers of a KV cache group share one object.
        ruled: dict[int, MaskMetadata] = {}
        for name, entry in metadata.items():
            if id(entry) not in ruled:
                queries = replace(entry.queries, rule=rule)
                ruled[id(entry)] = replace(entry, queries=queries)
            metadata[name] = ruled[id(entry)]
        return metadata
