"""The authors' window rule for DiffusionGemma on vLLM's CPU attention.

On a sliding-window layer every position of a denoised canvas sees the last W - 1 cached tokens and
the whole canvas, which no window argument can express. But a query of one token at the end of a
sequence, with a window of W + L - 1, sees exactly those keys, and its position does not matter,
because rotary embeddings have been applied. So each row of a canvas becomes a sequence of its own
in a second call of the kernel. This costs L passes over the window instead of one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

# Positions of rows in a step's queries (int64 ``[n]``), and the kernel's arguments that say what
# their virtual sequences are.
CanvasRows = tuple[torch.Tensor, dict[str, Any]]


class ReferenceWindowImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, which computes the rows of denoised canvases a second time."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See vLLM's class; shapes ``[tokens, heads, head size]``."""
        arguments = (layer, query, key, value, kv_cache, attn_metadata, output)
        super().forward(*arguments, output_scale, output_block_scale)
        if attn_metadata is None:
            return output
        blocks, heads, page, _ = kv_cache.shape
        keys, values = kv_cache.view(blocks, heads, page * 2, -1).chunk(2, dim=2)
        # The first layer of a step stores the rows in the metadata.
        if not hasattr(attn_metadata, "dllm_canvas_rows"):
            attn_metadata.dllm_canvas_rows = self._canvas_rows(layer, attn_metadata)
        for token, sequences in attn_metadata.dllm_canvas_rows:
            replacement = torch.full_like(output[token], torch.nan)
            ops.cpu_attention_with_kv_cache(
                query=query[token],
                key_cache=keys,
                value_cache=values,
                output=replacement,
                scale=self.scale,
                causal=False,
                alibi_slopes=self.alibi_slopes,
                softcap=self.logits_soft_cap,
                s_aux=self.sinks,
                dynamic_causal=None,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
                kv_cache_dtype=self.kv_cache_dtype,
                **sequences,
            )
            output[token] = replacement
        return output

    def _canvas_rows(self, layer: Any, metadata: Any) -> list[CanvasRows]:
        """The rows of a step's canvases, one item for each length of a canvas."""
        if metadata.dynamic_causal is None:
            return []
        start = metadata.query_start_loc
        query_length = (start[1:] - start[:-1]).long()
        denoised = metadata.dynamic_causal[: len(query_length)] == 0
        result = []
        for length in query_length[denoised].unique().tolist():
            request = (denoised & (query_length == length)).nonzero()[:, 0]
            token = (start[request].long()[:, None] + torch.arange(length)).flatten()
            of_row = request.repeat_interleave(length)
            query_start = torch.arange(len(token) + 1, dtype=torch.int32)
            seq_lens = metadata.seq_lens[of_row].contiguous()
            window = self.sliding_window + length - 1
            scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(token),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_size,
                seq_lens=seq_lens,
                dtype=layer.dtype,
                query_start_loc=query_start,
                causal=False,
                sliding_window_size=window,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            sequences = {
                "query_start_loc": query_start,
                "seq_lens": seq_lens,
                "sliding_window": window,
                "block_table": metadata.block_table[of_row].contiguous(),
                "scheduler_metadata": scheduler_metadata,
            }
            result.append((token, sequences))
        return result


def use_reference_window(model: torch.nn.Module) -> None:
    """Switch sliding-window layers to the authors' rule where they are vLLM's for CPUs."""
    for layer in model.modules():
        impl = getattr(layer, "impl", None)
        if isinstance(impl, CPUAttentionBackendImpl) and impl.sliding_window > 0:
            # vLLM's layer has already created its implementation; only `forward` differs, not the
            # attributes.
            impl.__class__ = ReferenceWindowImpl
