"""Our attention kernel as a backend of vLLM: ``--attention-backend CUSTOM``.

Keys and values are stored as vLLM's Triton backend does; the attention itself is
`ops.attention_triton`, which takes a rule for each request. The rules come from `MaskRules`, which
stands in the place of the rules of `attention` where this backend serves the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vllm_dllm.attention.metadata import Batch
from vllm_dllm.cpu.store import store
from vllm_dllm.ops.attention.masks import WHOLE, Rule, Window
from vllm_dllm.ops.attention.reference import Layer, PagedKV, Queries
from vllm_dllm.worker.slots import Phase, SlotState


@dataclass(frozen=True)
class MaskMetadata:
    """A step's requests for the layers of a KV cache group; the rules are `MaskRules`'s to add."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    queries: Queries


class MaskMetadataBuilder(AttentionMetadataBuilder[MaskMetadata]):
    """From vLLM's batch to `MaskMetadata`; uniform batches may be captured into CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not hasattr(vllm_config.model_config, "dllm"):  # set where our start-up has run
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
        queries = Queries(
            start=common.query_start_loc,
            seq_lens=common.seq_lens,
            table=common.block_table_tensor,
            rule=Rule(None, None),
            longest=common.max_query_len,
            furthest=common.max_seq_len,
        )
        return MaskMetadata(common.num_actual_tokens, common.slot_mapping, queries)


class MaskAttentionBackend(TritonAttentionBackend):
    """vLLM's Triton backend with our kernel in its middle."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]

    @staticmethod
    def get_name() -> str:
        """The name under which a third party's backend is known to vLLM."""
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
        """What the kernel takes."""
        return 32 <= head_size <= 512

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Paged decoders only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """No ALiBi at all."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """No such window."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No ranges of images that see themselves."""
        return False


class MaskAttentionImpl(TritonAttentionImpl):
    """One layer: vLLM's way into the cache, our way out of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Its queries would come in float8; the kernel takes them in the model's precision.
        self.supports_quant_query_input = False
        refused = {
            "ALiBi": self.alibi_slopes is not None,
            "attention chunks": self.chunk_lookback >= 0,
            f"attention of type {self.attn_type}": self.attn_type != AttentionType.DECODER,
        }
        for what, wanted in refused.items():
            if wanted:
                raise ValueError(f"attention backend CUSTOM (vllm-dllm) has no {what}")
        self.layer = Layer(
            scale=self.scale,
            width=max(0, self.sliding_window[0] + 1),
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
            store(key, value, kv_cache, slot_mapping)
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
        # Not at the top: without Triton this module must still load, to say what it lacks.
        from vllm_dllm.ops.attention.launch_triton import paged_attention

        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attention backend CUSTOM (vllm-dllm): no quantized output")
        if attn_metadata is None:
            return output.fill_(0)  # memory is being profiled
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


class MaskRules:
    """The rules of a batch, one for each request; an `AttentionRule` for this backend."""

    def __init__(
        self, rows: int, device: torch.device, fill: Callable[[Batch, Rule], None] | None = None
    ) -> None:
        self.fill = fill
        # Persistent, for full CUDA graphs.
        self.rule = Rule(*(torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2)))
        self.rule.block.fill_(1)

    def metadata(self, batch: Batch) -> dict[str, Any]:
        """See `AttentionRule`."""
        if self.fill is not None:
            self.fill(batch, self.rule)
        rule = Rule(self.rule.block[: batch.rows], self.rule.window[: batch.rows])
        # Layers of a KV cache group share one object.
        found = batch.as_it_is(causal=False)
        ruled: dict[int, MaskMetadata] = {}
        for name, entry in found.items():
            if id(entry) not in ruled:
                queries = replace(entry.queries, rule=rule)
                ruled[id(entry)] = replace(entry, queries=queries)
            found[name] = ruled[id(entry)]
        return found


def block_causal_rules(slots: SlotState) -> MaskRules:
    """LLaDA2: a prompt's blocks and a canvas by the same rule."""
    rules = MaskRules(len(slots.phase), slots.device)
    rules.rule.block.fill_(slots.length)
    return rules


def causal_unless_denoised_rules(slots: SlotState, window: Window) -> MaskRules:
    """DiffusionGemma: causal prompts and commits, canvases that see all of themselves.

    Args:
        slots: the requests.
        window: how a canvas that is denoised sees sliding-window layers.
    """

    def fill(batch: Batch, rule: Rule) -> None:
        requests = batch.input.num_reqs
        phase = slots.phase[batch.input.idx_mapping[:requests]]
        denoised = phase == Phase.DENOISE
        rule.block[:requests].copy_(torch.where(denoised, WHOLE, 1))
        rule.window[:requests].copy_(torch.where(denoised, int(window), int(Window.SYMMETRIC)))

    return MaskRules(len(slots.phase), slots.device, fill)
