"""The authors' window rule for DiffusionGemma on vLLM's CPU attention.

On a sliding-window layer every position of a denoised canvas sees the last W - 1 cached tokens and
the whole canvas. All rows have the same left edge, which no window argument can express. But a
query of one token at the end of a sequence, with a window of W + L - 1, sees exactly those keys.
Its position does not matter, because rotary embeddings have already been applied. So each row of a
canvas becomes a separate sequence (a *virtual sequence*) in a second call of the kernel, whose
result replaces that of the first call. This costs L passes over the window instead of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata


@dataclass(frozen=True)
class CanvasRows:
    """The n rows of all canvases of one length, as virtual sequences.

    Attributes:
        token: int64 ``[n]``, the rows' positions in the batch's queries.
        query_start: int32 ``[n + 1]``: 0, 1, 2, ...
        seq_lens: int32 ``[n]``, the end of each row's canvas.
        block_table: int32 ``[n, pages]``, each row's pages.
        window: W + L - 1.
        scheduler_metadata: the kernel's own metadata.
    """

    token: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    window: int
    scheduler_metadata: torch.Tensor


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
        for rows in self._canvas_rows(layer, attn_metadata):
            replacement = torch.full_like(output[rows.token], torch.nan)
            ops.cpu_attention_with_kv_cache(
                query=query[rows.token],
                key_cache=keys,
                value_cache=values,
                output=replacement,
                query_start_loc=rows.query_start,
                seq_lens=rows.seq_lens,
                scale=self.scale,
                causal=False,
                alibi_slopes=self.alibi_slopes,
                sliding_window=rows.window,
                block_table=rows.block_table,
                softcap=self.logits_soft_cap,
                scheduler_metadata=rows.scheduler_metadata,
                s_aux=self.sinks,
                dynamic_causal=None,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            output[rows.token] = replacement
        return output

    def _canvas_rows(self, layer: Any, metadata: Any) -> list[CanvasRows]:
        """The rows of a step's canvases; the first layer stores them in the metadata."""
        rows: list[CanvasRows] | None = getattr(metadata, "dllm_canvas_rows", None)
        if rows is None:
            metadata.dllm_canvas_rows = rows = self._find_canvas_rows(layer, metadata)
        return rows

    def _find_canvas_rows(self, layer: Any, metadata: Any) -> list[CanvasRows]:
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
            seq_lens = metadata.seq_lens[of_row].contiguous()
            query_start = torch.arange(len(token) + 1, dtype=torch.int32)
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
            table = metadata.block_table[of_row].contiguous()
            result.append(
                CanvasRows(token, query_start, seq_lens, table, window, scheduler_metadata)
            )
        return result


def use_reference_window(layers: dict[str, Any]) -> list[str]:
    """Switch the sliding-window layers among `layers` to the authors' rule.

    Returns:
        Their names.

    Raises:
        ValueError: a layer's attention is not vLLM's CPU attention.
    """
    switched = []
    for name, layer in layers.items():
        if not isinstance(layer.impl, CPUAttentionBackendImpl):
            raise ValueError(f"{name} has {type(layer.impl).__name__}, not CPU_ATTN")
        if layer.impl.sliding_window > 0:
            # vLLM's layer has already created its implementation; only `forward` differs, not the
            # attributes.
            layer.impl.__class__ = ReferenceWindowImpl
            switched.append(name)
    return switched
