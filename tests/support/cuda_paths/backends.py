"""vLLM's attention backends for CUDA, and ours, with their kernels computed by the reference."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.cuda_paths.watch import Watch
from tests.support.ops.attention import attention_reference
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import WHOLE, MaskRule, WindowRule


@dataclass(frozen=True)
class Backend:
    """A backend as a user chooses it; `flash_version` is the FlashAttention that vLLM finds."""

    name: str
    flash_version: int | None = None

    def __str__(self) -> str:
        return f"{self.name}_{self.flash_version}" if self.flash_version else self.name


FLASH_2, FLASH_4 = Backend("FLASH_ATTN", 2), Backend("FLASH_ATTN", 4)
TRITON, OURS = Backend("TRITON_ATTN"), Backend("CUSTOM")
BACKENDS = (FLASH_2, FLASH_4, TRITON, OURS)


def install(backend: Backend, watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Let a backend's lowest functions run on the CPU; FlashInfer is but a name to refuse."""
    if backend.flash_version:
        _flash(backend.flash_version, watch, patch)
    elif backend == TRITON:
        _triton(watch, patch)
    elif backend == OURS:
        _ours(watch, patch)
    elif backend.name == "FLASHINFER":
        # vLLM's module needs a package that exists for CUDA only.
        named = type("FlashInferBackend", (), {"get_name": staticmethod(lambda: backend.name)})
        module = types.SimpleNamespace(FlashInferBackend=named)
        patch.setitem(sys.modules, "vllm.v1.attention.backends.flashinfer", module)


def _flash(version: int, watch: Watch, patch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.backends.flash_attn as module
    from vllm.v1.attention.backend import AttentionCGSupport

    def varlen_attention(
        *,
        causal: bool,
        window_size: list[int] | None,
        dynamic_causal: torch.Tensor | None = None,
        fa_version: int,
        **arguments: Any,
    ) -> None:
        assert fa_version == version
        flags = causal if dynamic_causal is None else dynamic_causal
        _attend_by_flags(watch, arguments, flags, *(window_size or (-1, -1)))

    patch.setattr(module, "get_flash_attn_version", lambda *_, **__: version)
    patch.setattr(module, "flash_attn_varlen_func", varlen_attention, raising=False)
    patch.setattr(module, "reshape_and_cache_flash", _store(watch), raising=False)
    # vLLM settles this when it imports the module, by the version that it finds then.
    graphs = AttentionCGSupport.UNIFORM_BATCH
    patch.setattr(module.FlashAttentionMetadataBuilder, "_cudagraph_support", graphs)


def _triton(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.backends.triton_attn as module

    def unified_attention(
        *, causal: bool | torch.Tensor, window_size: tuple[int, int], **arguments: Any
    ) -> None:
        # The kernel makes a window symmetric where a sequence is not causal.
        _attend_by_flags(watch, arguments, causal, window_size[0], window_size[0])

    patch.setattr(module, "unified_attention", unified_attention)
    patch.setattr(module, "triton_reshape_and_cache_flash", _store(watch))


def _ours(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    import vllm_dllm.attention.backend as module

    def paged_attention(
        query: torch.Tensor,
        kv: PagedKV,
        queries: QueryBatch,
        layer: AttentionLayer,
        out: torch.Tensor,
    ) -> None:
        _attend(watch, query, kv, queries, layer, out)

    # The kernel's own module needs Triton, which may be missing here.
    launcher = types.ModuleType("vllm_dllm.ops.attention.launch_triton")
    launcher.paged_attention = paged_attention  # type: ignore[attr-defined]
    patch.setitem(sys.modules, launcher.__name__, launcher)
    store = module.store_keys_and_values

    def stored(key: Any, value: Any, kv_cache: Any, slot_mapping: torch.Tensor) -> None:
        watch.stores(slot_mapping)
        store(key, value, kv_cache, slot_mapping)

    patch.setattr(module, "store_keys_and_values", stored)


def _attend_by_flags(
    watch: Watch, arguments: dict[str, Any], causal: bool | torch.Tensor, left: int, right: int
) -> None:
    """Attention by the arguments that FlashAttention and vLLM's Triton kernel have in common.

    Of a window ``(left, right)`` -1 stands for no edge. A causal sequence has no keys after its
    query, whatever the window's right edge says.
    """
    causal = torch.as_tensor(causal).expand(len(arguments["cu_seqlens_q"]) - 1) != 0
    # What is not causal sees as far to the right.
    assert causal.all() or left == right
    window = WindowRule.NONE if left < 0 else WindowRule.SYMMETRIC
    queries = QueryBatch(
        *(arguments["cu_seqlens_q"], arguments["seqused_k"], arguments["block_table"]),
        MaskRule(torch.where(causal, 1, WHOLE), torch.full_like(causal, window, dtype=torch.int32)),
        *(arguments["max_seqlen_q"], arguments["max_seqlen_k"]),
    )
    layer = AttentionLayer(arguments["softmax_scale"], left + 1, arguments["softcap"])
    kv = PagedKV(arguments["k"], arguments["v"])
    _attend(watch, arguments["q"], kv, queries, layer, arguments["out"])


def _attend(
    watch: Watch,
    query: torch.Tensor,
    kv: PagedKV,
    queries: QueryBatch,
    layer: AttentionLayer,
    out: torch.Tensor,
) -> None:
    """Compute what a kernel would."""
    watch.calls += 1
    watch.note(_out_of_bounds(query, kv, queries))
    end = int(queries.query_start[-1])
    out[:end] = attention_reference(query, kv, queries, layer)[:end].to(out.dtype)


def _out_of_bounds(query: torch.Tensor, kv: PagedKV, queries: QueryBatch) -> Iterator[str]:
    """What a kernel would read out of bounds, or leave out."""
    tokens, lengths = queries.query_start.diff(), queries.seq_lens
    if int(queries.query_start[-1]) > len(query):
        yield f"queries end at token {int(queries.query_start[-1])} of {len(query)}"
    if min(len(lengths), len(queries.page_table)) < len(tokens):
        yield f"{len(tokens)} sequences, but {len(lengths)} lengths"
    lengths = lengths[: len(tokens)][tokens > 0]
    if (tokens > queries.max_query_len).any():
        yield f"queries of {tokens.tolist()} tokens, promised at most {queries.max_query_len}"
    if (lengths > queries.max_seq_len).any():
        yield f"sequences of {lengths.tolist()} tokens, promised at most {queries.max_seq_len}"
    page = kv.keys.shape[1]
    for pages, length in zip(queries.page_table[: len(tokens)][tokens > 0], lengths, strict=True):
        own = pages[: -(-int(length) // page)]
        if len(own) * page < length or ((own < 0) | (own >= len(kv.keys))).any():
            yield f"pages {own.tolist()} of {len(kv.keys)} for {int(length)} tokens"


def _store(watch: Watch) -> Callable[..., None]:

    def store(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *_: Any,
    ) -> None:
        watch.stores(slot_mapping)
        real = (slot_mapping >= 0).nonzero()[:, 0]
        slots, size = slot_mapping[real], key_cache.shape[1]
        page, slot = slots // size, slots % size
        key_cache[page, slot] = key[real].to(key_cache.dtype)
        value_cache[page, slot] = value[real].to(value_cache.dtype)

    return store
