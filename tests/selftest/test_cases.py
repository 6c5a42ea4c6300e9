"""What a machine has decides its cases; nothing here needs the machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.checkpoints import TINY
from vllm_dllm.attention.routes import Device
from vllm_dllm.selftest import steps
from vllm_dllm.selftest.cases import ATTENTION, FAMILIES, Case, absent, cases_of, route_of
from vllm_dllm.selftest.steps import busy_ms

SM75 = Device("cuda", (7, 5), True, frozenset({2}))
SM80 = Device("cuda", (8, 0), True, frozenset({2}))
SM90 = Device("cuda", (9, 0), True, frozenset({2, 3, 4}))
SM100 = Device("cuda", (10, 0), True, frozenset({2, 4}))
ROCM = Device("rocm")
CPU = Device("cpu", triton=False)
DEVICES = {"75": SM75, "80": SM80, "90": SM90, "100": SM100, "rocm": ROCM, "cpu": CPU}
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


def cases(device: Device, family: str) -> list[Case]:
    found = cases_of(device, fp8_cache=device not in (SM75, SM80))
    return [case for case in found if case.family == family and case.backend != "default"]


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
    stated = {
        family: json.loads((TINY / name / "config.json").read_text())
        for family, name in FAMILIES.items()
    }
    for family in ("llada2", "sdar"):
        (layer,) = ATTENTION[family].layers
        assert layer.head_size == stated[family]["head_dim"]
        assert layer.window == stated[family].get("sliding_window")
    text = stated["diffusion_gemma"]["text_config"]
    sliding, full = ATTENTION["diffusion_gemma"].layers
    assert (sliding.head_size, sliding.window) == (text["head_dim"], text["sliding_window"])
    assert {full.head_size} == {own["head_dim"] for own in text["per_layer_config"].values()}
    for family, own in stated.items():
        names = ("canvas_length", "block_length", "block_size")
        assert ATTENTION[family].canvas_length == next(own[n] for n in names if n in own)


def test_kernels_that_overlap_count_once() -> None:
    first, second = ("a", 0.0, 2000.0), ("b", 1000.0, 3000.0)
    within, later = ("b", 1500.0, 1600.0), ("a", 7000.0, 8000.0)
    assert busy_ms([later, within, second, first]) == 4.0
    assert busy_ms([]) == 0.0


@pytest.mark.long
def test_every_row_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With models of few ids on the CPU."""
    few = {
        name: replace(
            model,
            hidden=32,
            kind=replace(
                model.kind,
                vocabulary=300,
                length=8,
                mask_token=None if model.kind.mask_token is None else 299,
            ),
        )
        for name, model in steps.MODELS.items()
    }
    monkeypatch.setattr(steps, "MODELS", few)
    monkeypatch.setattr(steps, "REQUESTS", (1, 3))
    monkeypatch.setattr(steps, "TIMED_STEPS", 2)
    rows = list(steps.bench())
    found = {(row["model"], row["step"], row["requests"]) for row in rows}
    assert found == {
        (name, row, count)
        for name, model in few.items()
        for row in (steps.OF_NOISE if model.kind.mask_token is None else steps.ASKED)
        for count in (1, 3)
    }
    assert all(0 < row["host_ms"] <= row["ms"] for row in rows)
