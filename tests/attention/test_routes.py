"""Routes: whatever is there and whatever is asked for, a route that works or a refusal by name.

The table in docs/attention.md is what the function answers; run this file to print it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import ROOT
from tests.support.routes import DEVICES, GEMMA, GEMMA_REFERENCE, LLADA2, cuda
from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.attention.routes import (
    Device,
    LayerShape,
    ModelAttention,
    Options,
    Route,
    RouteError,
    choose_route,
)
from vllm_dllm.attention.served_route import apply_route, device_here, name_of
from vllm_dllm.families.block_causal.attention import BlockCausal

COLUMNS = {
    "LLaDA2": (LLADA2, "auto"),
    "LLaDA2, `fp8`": (LLADA2, "fp8"),
    "DiffusionGemma": (GEMMA, "auto"),
    "DiffusionGemma, `fp8`": (GEMMA, "fp8"),
    "`window=reference`": (GEMMA_REFERENCE, "auto"),
}
SHOWN = ("SM80", "SM89", "SM90", "SM100", "SM120", "ROCm", "CPU")


def row(name: str) -> str:
    """A device's line of the table."""
    cells = [name]
    for model, kv_cache_dtype in COLUMNS.values():
        try:
            route = choose_route(DEVICES[name], model, Options(kv_cache_dtype=kv_cache_dtype))
        except RouteError:
            cells.append("refused")
            continue
        version = f" {route.flash_version}" if route.flash_version else ""
        page = f" ({route.page_size})" if route.page_size else ""
        cells.append(f"`{route.backend}`{version}, {route.method}{page}")
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("name", SHOWN)
def test_the_documented_table(name: str) -> None:
    """By vLLM's own order LLaDA2 on SM90 with `fp8` had FLASHINFER, which raises at start-up."""
    assert row(name) in (ROOT / "docs" / "attention.md").read_text("utf-8").splitlines()


def test_what_the_table_does_not_show() -> None:
    assert row("SM86").replace("SM86", "SM80") == row("SM80")
    with_triton = replace(DEVICES["CPU"], triton=True)
    assert choose_route(with_triton, LLADA2, Options()).backend == "CPU_ATTN"
    fp8 = (DEVICES["SM100"], GEMMA_REFERENCE, Options(kv_cache_dtype="fp8"))
    assert choose_route(*fp8).backend == "CUSTOM"
    e5m2 = (DEVICES["SM90"], LLADA2, Options(kv_cache_dtype="fp8_e5m2"))
    assert choose_route(*e5m2).backend == "TRITON_ATTN"
    assert str(choose_route(DEVICES["SM90"], LLADA2, Options(kv_cache_dtype="fp8"))) == (
        "TRITON_ATTN, virtual sequences, KV pages of 32 tokens: FLASH_ATTN: it has no float8 KV "
        "cache for every head size (--kv-cache-dtype)"
    )


FLASH, TRITON = Options("FLASH_ATTN"), Options("TRITON_ATTN")


@pytest.mark.parametrize(
    ("device", "model", "asked", "words"),
    [
        ("SM90", LLADA2, Options("FLASHINFER"), "FLASHINFER: .*not been tried.*FLASH_ATTN or"),
        ("SM80", GEMMA, FLASH, "FlashAttention 2 has no causal flag.*TRITON_ATTN"),
        ("SM100", GEMMA, FLASH, "FlashAttention 4 has no .* on SM100; .*choose TRITON_ATTN"),
        ("SM90", GEMMA_REFERENCE, FLASH, "no left edge.*choose CUSTOM"),
        ("SM90", LLADA2, replace(FLASH, kv_cache_dtype="fp8"), "no float8 KV cache.*TRITON"),
        ("SM80", LLADA2, Options(None, "fp8"), "no attention backend on SM80 .*cache-dtype.*SM89"),
        ("SM80", LLADA2, replace(TRITON, kv_cache_dtype="fp8"), "--kv-cache-dtype.*no other"),
        ("SM90", LLADA2, Options(page_size=48), "block_size=48 .*multiple of 32"),
        ("CPU", LLADA2, TRITON, "TRITON_ATTN: the CPU platform has CPU_ATTN and"),
        ("CPU", LLADA2, Options("CUSTOM"), "CUSTOM: vLLM has no Triton here; choose CPU_ATTN"),
        ("ROCm", LLADA2, FLASH, "FLASH_ATTN: ROCm has TRITON_ATTN and CUSTOM only"),
    ],
)
def test_refusals(device: str, model: ModelAttention, asked: Options, words: str) -> None:
    with pytest.raises(RouteError, match=words):
        choose_route(DEVICES[device], model, asked)


def test_a_canvas_longer_than_its_window_is_wrong_on_triton() -> None:
    """The backend drops values beyond the window of a query tile's first row."""
    long = replace(GEMMA, layers=(LayerShape(256, 255), LayerShape(512)))
    with pytest.raises(RouteError, match="canvas of 256 is longer than the window 255"):
        choose_route(DEVICES["SM100"], long, Options("TRITON_ATTN"))
    assert choose_route(DEVICES["SM100"], long, Options()).backend == "CUSTOM"
    fits = replace(GEMMA, layers=(LayerShape(256, 256), LayerShape(512)))
    assert choose_route(DEVICES["SM100"], fits, Options()).backend == "TRITON_ATTN"
    assert choose_route(DEVICES["CPU"], long, Options()).backend == "CPU_ATTN"


def test_without_flash_attention_4_hopper_has_another_route() -> None:
    hopper = cuda(9, 0, 2, 3)
    route = choose_route(hopper, LLADA2, Options())
    assert route.backend == "TRITON_ATTN" and "FlashAttention 3 keeps one entry" in route.reason
    assert choose_route(hopper, GEMMA, Options()).backend == "TRITON_ATTN"


BACKENDS = (
    *(None, "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "CUSTOM", "CPU_ATTN"),
    *("FLEX_ATTENTION", "ROCM_ATTN", "TRITON_FLASH_ATTN", "CUSTOM of somebody.else"),
)
KV_CACHE_DTYPES = (*("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),)
asked_for = st.builds(
    Options,
    backend=st.sampled_from(BACKENDS),
    kv_cache_dtype=st.sampled_from(KV_CACHE_DTYPES),
    page_size=st.sampled_from((None, 16, 32, 48, 64, 128)),
    flash_version=st.sampled_from((None, 2, 3, 4)),
)
devices = st.builds(
    Device,
    platform=st.just("cuda"),
    capability=st.sampled_from(((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0))),
    triton=st.booleans(),
    flash_versions=st.frozensets(st.sampled_from((2, 3, 4))),
) | st.builds(Device, platform=st.sampled_from(("rocm", "cpu", "xpu")), triton=st.booleans())
layers = st.builds(
    LayerShape,
    head_size=st.sampled_from((16, 32, 64, 128, 256, 512)),
    window=st.sampled_from((None, 128, 1024)),
)
attention = st.builds(
    ModelAttention,
    block_causal=st.just(False),
    canvas_length=st.sampled_from((32, 256)),
    layers=st.lists(layers, min_size=1, max_size=2).map(tuple),
    window=st.sampled_from(("symmetric", "reference")),
    dtype=st.sampled_from(("bfloat16", "float16", "float32")),
) | st.builds(
    ModelAttention,
    block_causal=st.just(True),
    canvas_length=st.sampled_from((8, 32, 48)),
    layers=layers.map(lambda layer: (replace(layer, window=None),)),
    dtype=st.sampled_from(("bfloat16", "float16", "float32")),
)
REFUSALS = ("--attention-backend ", "block_size=", "no attention backend on ")


def impossible(device: Device, model: ModelAttention, asked: Options, route: Route) -> list[str]:
    """What of a route cannot work, said anew and not with the rules that chose it."""
    reference = model.window == "reference" and any(layer.window for layer in model.layers)
    version, float8 = route.flash_version, asked.kv_cache_dtype.startswith("fp8")
    flash = route.backend == "FLASH_ATTN"
    cuda_below_89 = device.platform == "cpu" or (device.capability or (9, 9)) < (8, 9)
    faults = {
        "another backend than asked for": asked.backend not in (None, route.backend),
        "a backend that nobody has tried": route.backend
        not in ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", "CUSTOM"),
        "the CPU's": (route.backend == "CPU_ATTN") and device.platform != "cpu",
        "not the CPU's": device.platform == "cpu"
        and route.backend in ("FLASH_ATTN", "TRITON_ATTN"),
        "no Triton": route.backend in ("TRITON_ATTN", "CUSTOM") and not device.triton,
        "no FlashAttention": flash and version not in device.flash_versions,
        "FlashAttention elsewhere": flash and device.platform != "cuda",
        "float32 FlashAttention": flash and model.dtype == "float32",
        "version": flash
        and not model.block_causal
        and (version, (device.capability or (0,))[0]) != (4, 9),
        "window": reference and route.method not in ("rules", "canvas rows"),
        "canvas rows": route.method == "canvas rows" and device.platform != "cpu",
        "float8": float8
        and route.backend in ("TRITON_ATTN", "CUSTOM")
        and cuda_below_89
        and device.platform == "cuda",
        "blocks": model.block_causal and (route.page_size or 0) % model.canvas_length != 0,
        "no page": model.block_causal and not route.page_size,
        "method": (route.method == "virtual sequences") and not model.block_causal,
    }
    return [name for name, holds in faults.items() if holds]


@settings(max_examples=2000)
@given(device=devices, model=attention, asked=asked_for)
def test_a_route_that_works_or_a_refusal_by_name(
    device: Device, model: ModelAttention, asked: Options
) -> None:
    try:
        route = choose_route(device, model, asked)
    except RouteError as refusal:
        assert str(refusal).startswith(REFUSALS)
        return
    assert impossible(device, model, asked, route) == []
    # Options for by name, the same route is not refused.
    again = choose_route(device, model, replace(asked, backend=route.backend))
    assert replace(again, reason=route.reason) == route


# ---- A served model's route in vLLM's configuration, and the CUDA graphs that are right for it


def test_all_layers_have_the_same_backend() -> None:
    """Our backend takes rules and no causal tensor, and layers share one kind of metadata."""
    attention = SimpleNamespace(backend_per_kind={"sliding_window": "CUSTOM"})
    config: Any = SimpleNamespace(attention_config=attention)
    with pytest.raises(RouteError, match=r"backend_per_kind: .* remove it"):
        apply_route(config, GEMMA)


def test_anothers_backend_under_the_free_name_is_not_ours() -> None:
    """vLLM has one name for backends of third parties; only ours takes rules."""

    class Foreign:
        get_name = staticmethod(lambda: "CUSTOM")

    with pytest.raises(RouteError, match=r"CUSTOM of tests\.attention\.test_routes: .*tried"):
        choose_route(device_here(), LLADA2, Options(name_of(Foreign)))


@pytest.mark.parametrize(
    "lengths",
    [
        (32, 33),  # a prompt of more than a block
        (64, 64),  # fused commits: a block and the next canvas
    ],
)
def test_no_full_graph_replays_a_query_longer_than_a_block(lengths: tuple[int, ...]) -> None:
    """It would read the whole query with one mask, and answer wrongly without a word."""
    batch: Any = SimpleNamespace(
        num_scheduled_tokens=np.array(lengths), num_draft_tokens_per_req=np.array((32, 32))
    )
    rule = BlockCausal(32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=rf"query of {max(lengths)} tokens.*FULL_DECODE_ONLY"):
        rule.metadata(AttentionBatch(batch, True, (), {}))


if __name__ == "__main__":
    print("| device | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    print(*map(row, SHOWN), sep="\n")
