"""Which attention the layers take: every pair of mask and backend has a route or a refusal."""

from __future__ import annotations

import pytest

from vllm_dllm.attention.support import (
    LayerKind,
    Masking,
    _name,
    choose_routes,
    described,
    route_of,
)

W = 1024
BLOCKS = Masking(blocks=True, window="symmetric", length=32)
SYMMETRIC = Masking(blocks=False, window="symmetric", length=256)
REFERENCE = Masking(blocks=False, window="reference", length=256)


def kind(backend: str, window: int | None = None, **more) -> LayerKind:
    return LayerKind(backend, window, **{"non_causal": True, **more})


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN"])
def test_llada2_takes_any_non_causal_backend(backend: str) -> None:
    """FlashAttention of any version: the virtual sequences ask for no causal tensor."""
    assert route_of(kind(backend, flash_version=2), BLOCKS).name == "virtual sequences"


def test_llada2_refuses_causal_attention() -> None:
    with pytest.raises(ValueError, match=r"global layers, FLEX.*FLASHINFER, TRITON_ATTN or CUSTOM"):
        route_of(kind("FLEX", non_causal=False), BLOCKS)


@pytest.mark.parametrize(
    ("layers", "masking", "name"),
    [
        (kind("TRITON_ATTN", W), SYMMETRIC, "causal tensor"),
        (kind("FLASH_ATTN", W, flash_version=4), SYMMETRIC, "causal tensor"),
        (kind("CPU_ATTN", W), SYMMETRIC, "causal tensor"),
        (kind("CPU_ATTN", W), REFERENCE, "canvas rows"),
        # Without a window both rules are the same.
        (kind("TRITON_ATTN"), REFERENCE, "causal tensor"),
        (kind("CUSTOM", W), REFERENCE, "rules"),
    ],
)
def test_diffusion_gemma(layers: LayerKind, masking: Masking, name: str) -> None:
    assert route_of(layers, masking).name == name


@pytest.mark.parametrize(
    ("layers", "masking", "words"),
    [
        (kind("FLASH_ATTN", flash_version=3), SYMMETRIC, "FLASH_ATTN 3.*FlashAttention 4"),
        (kind("FLASHINFER"), SYMMETRIC, "FLASHINFER.*TRITON_ATTN or CUSTOM"),
        (kind("TRITON_ATTN", W), REFERENCE, "dllm.window=reference.*backend CUSTOM"),
        (
            kind("FLASH_ATTN", W, flash_version=4),
            REFERENCE,
            "sliding-window layers, FLASH_ATTN 4.*backend CUSTOM",
        ),
    ],
)
def test_diffusion_gemma_refusals(layers: LayerKind, masking: Masking, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        route_of(layers, masking)


def test_a_canvas_longer_than_its_window_is_wrong_on_triton() -> None:
    """The backend drops values beyond the window of a query tile's first row."""
    layers = kind("TRITON_ATTN", 255)
    with pytest.raises(ValueError, match="canvas of 256 is longer than the window 255"):
        route_of(layers, SYMMETRIC)
    assert route_of(kind("TRITON_ATTN", 256), SYMMETRIC).name == "causal tensor"
    assert route_of(kind("CPU_ATTN", 255), SYMMETRIC).name == "causal tensor"


def test_our_backend_has_all_layers_or_none() -> None:
    """It gets rules instead of a causal tensor, and metadata is made once for all layers."""
    with pytest.raises(ValueError, match="others TRITON_ATTN"):
        choose_routes([kind("CUSTOM"), kind("TRITON_ATTN", W)], SYMMETRIC)
    assert len(choose_routes([kind("CUSTOM"), kind("CUSTOM", W)], REFERENCE)) == 2


def test_anothers_backend_under_the_free_name_is_not_ours() -> None:
    """vLLM has one name for backends of third parties; only ours takes rules."""

    class Foreign:
        get_name = staticmethod(lambda: "CUSTOM")

    named = kind(_name(Foreign))
    assert route_of(named, BLOCKS).name == "virtual sequences"
    with pytest.raises(ValueError, match=r"CUSTOM of tests\.engine\.test_routes"):
        route_of(named, SYMMETRIC)


def test_one_line_says_all() -> None:
    routes = choose_routes([kind("CPU_ATTN", W), kind("CPU_ATTN")], REFERENCE)
    assert described(routes) == (
        "sliding-window layers, CPU_ATTN: canvas rows (no window of the backend has one left edge "
        "for a canvas); global layers, CPU_ATTN: causal tensor (the backend takes one causal flag "
        "a request)"
    )
