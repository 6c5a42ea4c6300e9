"""Children that crash, hang or leave processes behind; figures and options without an engine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from vllm_dllm.attention.route_parts import Device
from vllm_dllm.selftest import bench, floor
from vllm_dllm.selftest.cases import Case
from vllm_dllm.selftest.child import engine_options
from vllm_dllm.selftest.children import reason, run, run_job
from vllm_dllm.selftest.machine import Machine


def python(code: str, limit: float = 60.0) -> str:
    status, log, _ = run((sys.executable, "-c", code), limit)
    return reason(status, log, limit) if status != 0 else "\n".join(log)


def test_output_of_both_kinds_is_kept() -> None:
    assert python("import os; os.write(1, b'a\\n'); os.write(2, b'b\\n')") == "a\nb"


def test_how_a_child_ended_is_said() -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert python(kill) == "killed by SIGSEGV"
    assert python("import time; time.sleep(60)", 0.5) == "stopped after 0 seconds"
    assert python("raise ValueError('bad')") == "exit status 1: ValueError: bad"
    assert python("print('no more'); raise SystemExit(3)") == "exit status 3: no more"


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid)"
    )
    grandchild = int(python(code))
    for _ in range(100):
        state = Path(f"/proc/{grandchild}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(grandchild, 9)
        pytest.fail("it is still there")


def test_a_job_that_the_child_cannot_read() -> None:
    outcome = run_job({"case": {}}, 60)
    assert outcome.answer is None
    assert outcome.problem == "exit status 1: KeyError: 'requests'"
    assert any("Traceback" in line for line in outcome.log)


def test_options_of_an_engine() -> None:
    def options(case: Case) -> dict[str, object]:
        found = engine_options(case.as_dict(), "model")
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


def test_the_floor_is_the_larger_of_two() -> None:
    device = floor.Device(bandwidth=10.0, rate=100.0)
    assert device.least(20.0, 100.0) == 2.0
    assert device.least(20.0, 500.0) == 5.0


def test_the_floor_is_measured() -> None:
    """With sizes that mean nothing; a copy and a product do take some time."""
    device = floor.measure("cpu", torch.float32, short=True)
    assert 1e6 < device.bandwidth < 1e14
    assert 1e6 < device.rate < 1e16


def test_what_is_timed() -> None:
    cpu, gpu = Machine(Device("cpu")), Machine(Device("cuda", (9, 0)))
    assert [system.name for system in bench.systems(cpu)] == [
        "llada2, EAGER",
        "diffusion_gemma, EAGER",
        "sdar, EAGER",
        "diffusion_gemma, native, EAGER",
    ]
    (ours, *_, native) = (bench.job(system, Path("x"), cpu) for system in bench.systems(cpu))
    assert ours["environment"] == {"VLLM_DLLM_NATIVE": "0"}
    assert native["environment"] == {"VLLM_DLLM_NATIVE": "1", "TORCH_COMPILE_DISABLE": "1"}
    assert all(
        "TORCH_COMPILE_DISABLE" not in bench.job(system, Path("x"), gpu)["environment"]
        for system in bench.systems(gpu)
    )
