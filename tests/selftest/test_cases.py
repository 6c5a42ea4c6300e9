"""What a machine has decides its cases; nothing here needs the machine."""

from __future__ import annotations

import json

import pytest

from tests.support.checkpoints import TINY
from vllm_dllm.attention.routes import Device
from vllm_dllm.selftest.cases import ATTENTION, FAMILIES, Case, absent, cases_of, route_of
from vllm_dllm.selftest.child import engine_options

SM75 = Device("cuda", (7, 5), True, frozenset({2}))
SM80 = Device("cuda", (8, 0), True, frozenset({2}))
SM90 = Device("cuda", (9, 0), True, frozenset({2, 3, 4}))
SM100 = Device("cuda", (10, 0), True, frozenset({2, 4}))
ROCM = Device("rocm")
CPU = Device("cpu", triton=False)
DEVICES = {"75": SM75, "80": SM80, "90": SM90, "100": SM100, "rocm": ROCM, "cpu": CPU}
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


def cases(device: Device, family: str) -> list[Case]:
    """The cases of a family, without those that leave the backend to the server."""
    found = cases_of(device, fp8_cache=device not in (SM75, SM80))
    return [case for case in found if case.family == family and case.backend != "default"]


def backends(device: Device, family: str) -> set[str]:
    return {
        f"{case.backend}-{case.flash}" if case.flash else case.backend
        for case in cases(device, family)
    }


@every_device
def test_every_case_has_a_route_and_a_name_of_its_own(device: Device) -> None:
    found = cases_of(device, fp8_cache=True)
    assert [case.name for case in found if route_of(device, case) is None] == []
    assert len({case.name for case in found}) == len(found)
    defaults = found[: len(FAMILIES)]
    assert [case.name for case in defaults] == [f"{family}/defaults" for family in FAMILIES]
    assert {case.dtype for case in defaults} == {"float16" if device is SM75 else "bfloat16"}
    assert all(case.kernels != "triton" or device.triton for case in found)
    lacking = dict(absent(device))
    assert not any(f"{case.family}, {case.backend}" in lacking for case in found)


@every_device
def test_an_old_compiler_is_not_given_functions_without_triton_kernels(device: Device) -> None:
    new, old = cases_of(device), cases_of(device, old_compiler=True)
    left_out = [case for case in new if case not in old]
    assert {case.kernels for case in left_out} == (set() if device is CPU else {"torch"})
    assert "EAGER" not in {case.graphs for case in left_out}
    assert ("kernels: torch, compiled" in dict(absent(device, True))) == (device is not CPU)


def test_backends_of_each_device() -> None:
    triton = {"TRITON_ATTN", "CUSTOM"}
    for device in (SM80, SM90, SM100):
        flash = {f"FLASH_ATTN-{version}" for version in device.flash_versions - {3}}
        assert backends(device, "llada2") == backends(device, "sdar") == triton | flash
    assert backends(SM90, "diffusion_gemma") == triton | {"FLASH_ATTN-4"}
    for device in (SM75, SM80, SM100, ROCM):
        assert backends(device, "diffusion_gemma") == triton
    assert backends(CPU, "llada2") == {"CPU_ATTN"}
    hopper = Device("cuda", (9, 0), True, frozenset({2, 3}))
    assert backends(hopper, "llada2") == triton | {"FLASH_ATTN-2"}


def test_a_float8_cache_only_where_the_device_has_one() -> None:
    assert not any(case.cache == "fp8" for case in cases_of(SM80))
    chosen = [case for case in cases_of(SM90, fp8_cache=True) if case.cache == "fp8"]
    assert {case.family for case in chosen} == {"llada2", "diffusion_gemma"}
    assert not any(case.exact for case in chosen)


def test_full_graphs_are_tried_only_where_they_are_right() -> None:
    full = {
        (case.family, case.backend)
        for device in DEVICES.values()
        for case in cases_of(device)
        if case.graphs == "FULL"
    }
    assert full == {("diffusion_gemma", "TRITON_ATTN")}


def test_the_attention_is_that_of_the_checkpoints() -> None:
    llada2 = json.loads((TINY / FAMILIES["llada2"] / "config.json").read_text())
    (layer,) = ATTENTION["llada2"].layers
    assert (layer.head_size, layer.window) == (llada2["head_dim"], None)
    gemma = json.loads((TINY / FAMILIES["diffusion_gemma"] / "config.json").read_text())
    text = gemma["text_config"]
    sliding, full = ATTENTION["diffusion_gemma"].layers
    assert (sliding.head_size, sliding.window) == (text["head_dim"], text["sliding_window"])
    assert {full.head_size} == {own["head_dim"] for own in text["per_layer_config"].values()}
    sdar = json.loads((TINY / FAMILIES["sdar"] / "config.json").read_text())
    (layer,) = ATTENTION["sdar"].layers
    assert (layer.head_size, layer.window) == (sdar["head_dim"], sdar["sliding_window"])
    assert ATTENTION["sdar"].canvas_length == sdar["block_size"]
    assert ATTENTION["llada2"].canvas_length == llada2["block_length"]
    assert ATTENTION["diffusion_gemma"].canvas_length == gemma["canvas_length"]


def test_options_of_an_engine() -> None:
    def options(case: Case) -> dict[str, object]:
        found = engine_options(vars(case), "model")
        always = ("model", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes")
        return {name: found[name] for name in found if name not in (*always, "kv_cache_dtype")}

    assert options(Case("llada2")) == {
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.1,
        "additional_config": {"dllm": {}},
    }
    case = Case("llada2", "FLASH_ATTN", "PIECEWISE", "triton", "float16", "sync", flash=2)
    assert options(case) == {
        "dtype": "float16",
        "gpu_memory_utilization": 0.1,
        "additional_config": {"dllm": {"kernels": "triton"}},
        "async_scheduling": False,
        "compilation_config": {"cudagraph_mode": "PIECEWISE"},
        "attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 2},
    }
    case = Case("llada2", "CPU_ATTN", "EAGER", "torch", "float32", "async", window="reference")
    eager = options(case)
    assert eager["enforce_eager"] is True and "attention_config" not in eager
    assert eager["additional_config"] == {"dllm": {"window": "reference", "kernels": "torch"}}
    fused = options(Case("sdar", scheduling="async", fused_commit="on"))
    assert fused["additional_config"] == {"dllm": {"fused_commit": "on"}}
    assert fused["async_scheduling"] is True
