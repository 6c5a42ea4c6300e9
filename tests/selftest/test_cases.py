"""What a machine has decides its cases; nothing here needs the machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from tests.support.checkpoints import TINY
from vllm_dllm.attention.route_parts import Device
from vllm_dllm.selftest import command
from vllm_dllm.selftest.cases import (
    ATTENTION,
    FAMILIES,
    Case,
    absent,
    cases_of,
    route_of,
)
from vllm_dllm.selftest.children import Outcome
from vllm_dllm.selftest.command import jobs
from vllm_dllm.selftest.machine import Machine

SM75 = Machine(Device("cuda", (7, 5), True, frozenset({2})))
SM80 = Machine(Device("cuda", (8, 0), True, frozenset({2})))
SM90 = Machine(Device("cuda", (9, 0), True, frozenset({2, 3, 4})), fp8_cache=True)
SM100 = Machine(Device("cuda", (10, 0), True, frozenset({2, 4})), fp8_cache=True)
ROCM = Machine(Device("rocm"), fp8_cache=True)
CPU = Machine(Device("cpu", triton=False), fp8_cache=True)
MACHINES = {"75": SM75, "80": SM80, "90": SM90, "100": SM100, "rocm": ROCM, "cpu": CPU}
GPUS = {name: machine for name, machine in MACHINES.items() if machine is not CPU}


def backends(machine: Machine, family: str) -> set[str]:
    cases = (case for case in cases_of(machine) if case.family == family)
    return {f"{case.backend}-{case.flash}" if case.flash else case.backend for case in cases}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("every", [False, True])
def test_every_case_has_a_route_and_a_name_of_its_own(machine: Machine, every: bool) -> None:
    cases = cases_of(machine, every=every)
    assert [case.name for case in cases if route_of(machine, case) is None] == []
    assert len({case.name for case in cases}) == len(cases)
    assert {case.family for case in cases} == FAMILIES.keys()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_server_s_defaults_come_first(machine: Machine) -> None:
    first = cases_of(machine)[: len(FAMILIES)]
    assert [case.name for case in first] == [f"{family}/defaults" for family in FAMILIES]
    for case in first:
        assert (case.backend, case.graphs, case.kernels) == ("default", "default", "default")
        assert case.dtype == ("float16" if machine is SM75 else "bfloat16")


def test_backends_of_each_machine() -> None:
    triton = {"default", "TRITON_ATTN", "CUSTOM"}
    for machine in (SM80, SM90, SM100):
        flash = {f"FLASH_ATTN-{version}" for version in machine.device.flash_versions - {3}}
        assert backends(machine, "llada2") == triton | flash
    assert backends(SM90, "diffusion_gemma") == triton | {"FLASH_ATTN-4"}
    for machine in (SM75, SM80, SM100, ROCM):
        assert backends(machine, "diffusion_gemma") == triton
    assert backends(CPU, "llada2") == {"default", "CPU_ATTN"}
    hopper = Machine(Device("cuda", (9, 0), True, frozenset({2, 3})))
    assert backends(hopper, "llada2") == triton | {"FLASH_ATTN-2", "FLASH_ATTN-3"}


@pytest.mark.parametrize("machine", GPUS.values(), ids=GPUS)
def test_a_gpu_has_every_graph_mode_and_both_kinds_of_kernels(machine: Machine) -> None:
    for family in ("llada2", "diffusion_gemma"):
        cases = [case for case in cases_of(machine) if case.family == family]
        modes = {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE", "EAGER"}
        assert modes <= {case.graphs for case in cases}
        for backend in {case.backend for case in cases} - {"default"}:
            of_backend = [case for case in cases if case.backend == backend]
            assert {case.kernels for case in of_backend} >= {"torch", "triton"}
            assert {case.scheduling for case in of_backend} == {"async", "sync"}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_windows_of_two_blocks_on_every_backend(machine: Machine) -> None:
    """With the graphs that servers have, and next to them the other ways to commit blocks."""
    cases = [case for case in cases_of(machine) if case.family == "sdar"]
    windows = {case.backend: case for case in cases if case.commits == "two blocks"}
    assert windows.keys() == {case.backend for case in cases} - {"default"}
    assert windows.keys() == {name.split("-")[0] for name in backends(machine, "llada2")} - {
        "default"
    }
    graphs = "EAGER" if machine is CPU else "FULL_AND_PIECEWISE"
    assert {(case.graphs, case.scheduling) for case in windows.values()} == {(graphs, "async")}
    assert {name for name, case in windows.items() if not case.exact} <= {"FLASH_ATTN"}
    exact = [case for case in cases if case.exact and case.commits != "two blocks"]
    (separate,) = (case for case in exact if case.commits == "separate")
    (granted,) = (case for case in exact if case.scheduling == "sync")
    assert separate.scheduling == "async" and granted.commits == "default"
    assert separate.backend == granted.backend != "FLASH_ATTN"
    kernels = {case.kernels for case in windows.values()}
    assert kernels == ({"torch", "triton"} if machine.device.triton else {"torch"})


def test_every_combination_has_both_settings_of_commits() -> None:
    """DiffusionGemma has one way, and would not start with the setting."""
    for machine in MACHINES.values():
        cases = cases_of(machine, every=True)[len(FAMILIES) :]
        for family, commits in (("llada2", {"on", "off"}), ("diffusion_gemma", {"default"})):
            assert {c.fused_commit for c in cases if c.family == family} == commits


def test_tokens_are_compared_wherever_a_backend_has_float32() -> None:
    for machine in MACHINES.values():
        for case in cases_of(machine):
            if case.backend in ("TRITON_ATTN", "CUSTOM", "CPU_ATTN") and case.graphs == "EAGER":
                same = [c for c in cases_of(machine) if c.backend == case.backend and c.exact]
                assert same, case.name


def test_full_graphs_are_tried_only_where_they_are_right() -> None:
    full = {(c.family, c.backend) for c in cases_of(SM90, every=True) if c.graphs == "FULL"}
    assert full == {("diffusion_gemma", "TRITON_ATTN")}


def test_what_is_absent_is_named_and_never_a_case() -> None:
    for machine in MACHINES.values():
        lacking = dict(absent(machine))
        assert all(lacking.values())
        for case in cases_of(machine, every=True):
            assert f"{case.family}, {case.backend}" not in lacking
            assert case.kernels != "triton" or "kernels triton" not in lacking
            assert case.cache == "auto" or "cache fp8" not in lacking
    assert "CUDA graphs" in dict(absent(CPU)) and "CUDA graphs" not in dict(absent(SM90))
    assert "bfloat16" in dict(absent(SM75))
    assert "cache fp8" in dict(absent(SM80))


def test_a_float8_cache_is_served_by_the_backend_that_has_one() -> None:
    chosen = {case.family: case for case in cases_of(SM90) if case.cache == "fp8"}
    assert chosen["llada2"].backend == "TRITON_ATTN"
    assert not any(case.exact for case in chosen.values())


def test_the_few_are_few() -> None:
    """Half a minute for each, eight at a time: two and a half minutes."""
    assert all(len(cases_of(machine)) <= 40 for machine in MACHINES.values())
    assert len(cases_of(CPU)) <= 17
    for machine in MACHINES.values():
        assert sum(case.family == "sdar" for case in cases_of(machine)) <= 6


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


@pytest.mark.parametrize(
    ("machine", "number"),
    [
        (Machine(Device("cpu"), cores=2, memory=64 << 30), 2),
        (Machine(Device("cpu"), cores=64, memory=64 << 30), 8),
        (Machine(Device("cpu"), cores=8, memory=7 << 30), 2),
        (Machine(Device("cuda", (9, 0)), cores=16, memory=140 << 30), 8),
        (Machine(Device("cuda", (9, 0)), cores=16, memory=20 << 30), 3),
        (Machine(Device("cuda", (9, 0)), cores=1, memory=1 << 30), 1),
    ],
)
def test_children_at_a_time(machine: Machine, number: int) -> None:
    assert jobs(machine) == number


def run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, list[dict[str, Any]]]:
    """The command on a machine that nobody has: its exit status and the jobs of its children."""
    started: list[dict[str, Any]] = []

    def run_job(job: dict[str, Any], limit: float) -> Outcome:
        started.append(job)
        return Outcome(None, "no such machine", (), 0.0)

    monkeypatch.setattr(command, "this_machine", lambda: machine)
    monkeypatch.setattr(command, "run_job", run_job)
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return command.run(parser.parse_args(options)), started


def test_listing_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SM90, monkeypatch, "--list") == (0, [])
    lines = capsys.readouterr().out.splitlines()
    assert set(lines) >= {case.name for case in cases_of(SM90)}
    assert [line.split(":")[0].strip() for line in lines[lines.index("not here:") + 1 :]] == [
        what for what, _ in absent(SM90)
    ]


def test_a_machine_on_which_nothing_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every case has a line of its own, and no case stops another."""
    status, started = run(SM90, monkeypatch, "--jobs", "4")
    assert status == 1
    assert sorted(job["case"]["name"] for job in started) == sorted(
        case.name for case in cases_of(SM90)
    )
    number = len(cases_of(SM90))
    assert f"0 passed, {number} FAILED, 0 not run" in capsys.readouterr().out
    assert run(SM90, monkeypatch, "--only", "no such case") == (1, [])
    status, started = run(SM90, monkeypatch, "--only", "FLASH_ATTN", "--limit", "1e-9")
    assert (status, started) == (1, [])
    number = sum("FLASH_ATTN" in case.name for case in cases_of(SM90))
    assert f"0 passed, 0 FAILED, {number} not run" in capsys.readouterr().out


def test_exact_cases() -> None:
    assert Case("llada2", dtype="float32").exact
    assert not Case("llada2", dtype="float32", cache="fp8").exact
    assert not Case("llada2", dtype="bfloat16").exact
