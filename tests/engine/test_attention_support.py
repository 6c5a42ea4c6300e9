"""Which backend can express which mask: each pair is supported in one way, or refused."""

from __future__ import annotations

import pytest

from vllm_dllm.attention.support import (
    LayerBackend,
    ModelMasks,
    _backend_name,
    described,
    support_for,
    support_for_all,
)

W = 1024
BLOCKS = ModelMasks(block_causal=True, window="symmetric", canvas_length=32)
SYMMETRIC = ModelMasks(block_causal=False, window="symmetric", canvas_length=256)
REFERENCE = ModelMasks(block_causal=False, window="reference", canvas_length=256)


def served_by(backend: str, window: int | None = None, **more) -> LayerBackend:
    return LayerBackend(backend, window, **{"non_causal": True, **more})


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN"])
def test_llada2_takes_any_non_causal_backend(backend: str) -> None:
    """FlashAttention of any version: the virtual sequences ask for no causal tensor."""
    assert support_for(served_by(backend, flash_version=2), BLOCKS).method == "virtual sequences"


def test_llada2_refuses_causal_attention() -> None:
    with pytest.raises(ValueError, match=r"global layers, FLEX.*FLASHINFER, TRITON_ATTN or CUSTOM"):
        support_for(served_by("FLEX", non_causal=False), BLOCKS)


@pytest.mark.parametrize(
    ("layers", "masks", "method"),
    [
        (served_by("TRITON_ATTN", W), SYMMETRIC, "causal tensor"),
        (served_by("FLASH_ATTN", W, flash_version=4), SYMMETRIC, "causal tensor"),
        (served_by("CPU_ATTN", W), SYMMETRIC, "causal tensor"),
        (served_by("CPU_ATTN", W), REFERENCE, "canvas rows"),
        # Without a window both rules are the same.
        (served_by("TRITON_ATTN"), REFERENCE, "causal tensor"),
        (served_by("CUSTOM", W), REFERENCE, "rules"),
    ],
)
def test_diffusion_gemma(layers: LayerBackend, masks: ModelMasks, method: str) -> None:
    assert support_for(layers, masks).method == method


@pytest.mark.parametrize(
    ("layers", "masks", "words"),
    [
        (served_by("FLASH_ATTN", flash_version=3), SYMMETRIC, "FLASH_ATTN 3.*FlashAttention 4"),
        (served_by("FLASHINFER"), SYMMETRIC, "FLASHINFER.*TRITON_ATTN or CUSTOM"),
        (served_by("TRITON_ATTN", W), REFERENCE, "dllm.window=reference.*backend CUSTOM"),
        (
            served_by("FLASH_ATTN", W, flash_version=4),
            REFERENCE,
            "sliding-window layers, FLASH_ATTN 4.*backend CUSTOM",
        ),
    ],
)
def test_diffusion_gemma_refusals(layers: LayerBackend, masks: ModelMasks, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        support_for(layers, masks)


def test_a_canvas_longer_than_its_window_is_wrong_on_triton() -> None:
    """The backend drops values beyond the window of a query tile's first row."""
    layers = served_by("TRITON_ATTN", 255)
    with pytest.raises(ValueError, match="canvas of 256 is longer than the window 255"):
        support_for(layers, SYMMETRIC)
    assert support_for(served_by("TRITON_ATTN", 256), SYMMETRIC).method == "causal tensor"
    assert support_for(served_by("CPU_ATTN", 255), SYMMETRIC).method == "causal tensor"


def test_our_backend_has_all_layers_or_none() -> None:
    """It takes rules, not a causal tensor, and all layers share one kind of metadata."""
    with pytest.raises(ValueError, match="others TRITON_ATTN"):
        support_for_all([served_by("CUSTOM"), served_by("TRITON_ATTN", W)], SYMMETRIC)
    assert len(support_for_all([served_by("CUSTOM"), served_by("CUSTOM", W)], REFERENCE)) == 2


def test_anothers_backend_under_the_free_name_is_not_ours() -> None:
    """vLLM has one name for backends of third parties; only ours takes rules."""

    class Foreign:
        get_name = staticmethod(lambda: "CUSTOM")

    named = served_by(_backend_name(Foreign))
    assert support_for(named, BLOCKS).method == "virtual sequences"
    with pytest.raises(ValueError, match=r"CUSTOM of tests\.engine\.test_attention_support"):
        support_for(named, SYMMETRIC)


def test_one_line_says_all() -> None:
    found = support_for_all([served_by("CPU_ATTN", W), served_by("CPU_ATTN")], REFERENCE)
    assert described(found) == (
        "sliding-window layers, CPU_ATTN: canvas rows (no window of the backend has one left edge "
        "for a canvas); global layers, CPU_ATTN: causal tensor (the backend takes one causal flag "
        "a request)"
    )
