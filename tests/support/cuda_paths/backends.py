"""vLLM's attention backends for CUDA, and ours, with their kernels computed by the reference."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.cuda_paths.reference import Edges, KernelCall
from tests.support.cuda_paths.watch import Watch
from vllm_dllm.ops.attention.inputs import AttentionLayer, PagedKV, QueryBatch
from vllm_dllm.ops.attention.masks import MaskRule, QuerySpan, interval


@dataclass(frozen=True)
class Backend:
    """A backend as a user chooses it.

    Attributes:
        name: vLLM's name.
        flash_version: the version of FlashAttention that vLLM finds; None for other backends.
    """

    name: str
    flash_version: int | None = None

    def __str__(self) -> str:
        return f"{self.name}_{self.flash_version}" if self.flash_version else self.name


FLASH_2, FLASH_4 = Backend("FLASH_ATTN", 2), Backend("FLASH_ATTN", 4)
TRITON, OURS = Backend("TRITON_ATTN"), Backend("CUSTOM")
BACKENDS = (FLASH_2, FLASH_4, TRITON, OURS)
# What makes the metadata: vLLM's own classes, and ours.
BUILDERS = {
    "FLASH_ATTN": "vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder",
    "TRITON_ATTN": "vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder",
    "CUSTOM": "vllm_dllm.attention.backend.MaskMetadataBuilder",
}


def install(backend: Backend, watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Let a backend's lowest functions run on the CPU.

    Args:
        backend: one of `BACKENDS`. Another one is but a name, for the start-up to refuse it.
        watch: told of every call.
        patch: undoes it.
    """
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
        left, right = window_size or (-1, -1)
        flags = causal if dynamic_causal is None else dynamic_causal
        watch.attends(_call(arguments, flag_edges(flags, left, right), left + 1))

    patch.setattr(module, "get_flash_attn_version", lambda *_, **__: version)
    patch.setattr(module, "flash_attn_varlen_func", varlen_attention, raising=False)
    patch.setattr(module, "reshape_and_cache_flash", _store(watch), raising=False)
    # vLLM settles this when it imports the module, by the version that it finds then.
    graphs = AttentionCGSupport.UNIFORM_BATCH
    patch.setattr(module.FlashAttentionMetadataBuilder, "_cudagraph_support", graphs)
    _watch_builder(module.FlashAttentionMetadataBuilder, watch, patch)


def _triton(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.backends.triton_attn as module

    def unified_attention(
        *, causal: bool | torch.Tensor, window_size: tuple[int, int], **arguments: Any
    ) -> None:
        left = window_size[0]
        # The kernel makes a window symmetric where a sequence is not causal.
        watch.attends(_call(arguments, flag_edges(causal, left, left), left + 1))

    patch.setattr(module, "unified_attention", unified_attention)
    patch.setattr(module, "triton_reshape_and_cache_flash", _store(watch))
    _watch_builder(module.TritonAttentionMetadataBuilder, watch, patch)


def _ours(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    import vllm_dllm.attention.backend as module

    def paged_attention(
        query: torch.Tensor,
        kv: PagedKV,
        queries: QueryBatch,
        layer: AttentionLayer,
        out: torch.Tensor,
    ) -> None:
        def edges(sequence: int, position: torch.Tensor, length: int) -> Any:
            rule = MaskRule(*(int(part[sequence]) for part in queries.rule))
            return interval(position, QuerySpan(int(position[0]), length), rule, layer.window_width)

        watch.attends(
            KernelCall(
                *(query, kv.keys, kv.values, out),
                *(queries.query_start, queries.seq_lens, queries.page_table),
                *(queries.max_query_len, queries.max_seq_len, layer.scale, layer.soft_cap),
                edges=edges,
                window=layer.window_width,
            )
        )

    # The kernel's own module needs Triton, which may be missing here.
    launcher = types.ModuleType("vllm_dllm.ops.attention.launch_triton")
    launcher.paged_attention = paged_attention  # type: ignore[attr-defined]
    patch.setitem(sys.modules, launcher.__name__, launcher)
    store = module.store_keys_and_values

    def stored(key: Any, value: Any, kv_cache: Any, slot_mapping: torch.Tensor) -> None:
        watch.stores(slot_mapping)
        store(key, value, kv_cache, slot_mapping)

    patch.setattr(module, "store_keys_and_values", stored)
    _watch_builder(module.MaskMetadataBuilder, watch, patch)


def _call(arguments: dict[str, Any], edges: Edges, window: int) -> KernelCall:
    """The arguments that FlashAttention and vLLM's Triton kernel have in common."""
    return KernelCall(
        query=arguments["q"],
        keys=arguments["k"],
        values=arguments["v"],
        out=arguments["out"],
        query_start=arguments["cu_seqlens_q"],
        seq_lens=arguments["seqused_k"],
        page_table=arguments["block_table"],
        max_query_len=arguments["max_seqlen_q"],
        max_seq_len=arguments["max_seqlen_k"],
        scale=arguments["softmax_scale"],
        soft_cap=arguments["softcap"],
        edges=edges,
        window=window,
    )


def flag_edges(causal: bool | torch.Tensor, left: int, right: int) -> Edges:
    """The mask of a causal flag and a window ``(left, right)``, where -1 stands for no edge.

    A causal sequence has no keys behind its query, whatever the window's right edge says.
    """

    def edges(
        sequence: int, position: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_causal = bool(causal[sequence] if isinstance(causal, torch.Tensor) else causal)
        first = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
        end = torch.full_like(position, length)
        if is_causal:
            end = position + 1
        elif right >= 0:
            end = (position + right + 1).clamp(max=length)
        return first, end

    return edges


def _store(watch: Watch) -> Callable[..., None]:
    """What stores keys and values, with the arguments that vLLM's kernels take."""

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
        page, slot = (
            slot_mapping[real] // key_cache.shape[1],
            slot_mapping[real] % key_cache.shape[1],
        )
        key_cache[page, slot] = key[real].to(key_cache.dtype)
        value_cache[page, slot] = value[real].to(value_cache.dtype)

    return store


def _watch_builder(builder: type, watch: Watch, patch: pytest.MonkeyPatch) -> None:
    build = builder.build  # type: ignore[attr-defined]

    def built(self: Any, *arguments: Any, **options: Any) -> Any:
        watch.builders.add(f"{builder.__module__}.{builder.__qualname__}")
        return build(self, *arguments, **options)

    patch.setattr(builder, "build", built)
