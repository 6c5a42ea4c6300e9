"""The bridge changes what it says, for the models it was told, and nothing else."""

import ast
import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from vllm_cpu_v2.launch import STAND_INS

HERE = Path(__file__).parent
INTERPRETER = runpy.run_path(str(HERE / "triton_interpreter.py"))

vllm = pytest.importorskip("vllm")


def play(name: str, directory: Path) -> dict[str, Any]:
    """Run one scenario of bridge_scenarios.py in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / "bridge_scenarios.py"), name, str(directory)],
        env=INTERPRETER["child_env"](),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process sees of the runner choice."""
    return play("runner", tmp_path_factory.mktemp("models"))


def test_the_front_end_is_spared(runner: dict[str, Any]) -> None:
    """Install neither imports the worker, which replaces functions of torch, nor forces V2."""
    assert runner["parts"][0] == "v2-runner"
    assert runner["untouched"], "importing the plugin imported vLLM's configuration"
    assert runner["log"] == ["CPU bridge: " + ", ".join(runner["parts"])]
    assert runner["torchvision"], "it imports, with or without a need to declare schemas"
    assert not runner["worker_imported"]
    assert runner["forced_by_us"] is None
    assert runner["next_power_of_2"] == [1, 8, 32]


def test_bridged_model_takes_v2_by_itself(runner: dict[str, Any]) -> None:
    """Unless the environment says otherwise, which stays vLLM's to judge."""
    assert runner["bridged_None"] is True
    assert "V1 does not support: diffusion models" in runner["bridged_0"]
    assert runner["bridged_1"] is True
    # Only the Triton part of vLLM's check is passed over.
    assert "does not yet support: pipeline parallelism" in runner["unsupported"]


def test_ordinary_model_is_as_without_us(runner: dict[str, Any]) -> None:
    """V1 by default; V2 by force fails for want of Triton before vLLM 0.33; no model, no V2."""
    assert runner["ordinary_None"] is False
    assert runner["ordinary_0"] is False
    forced = runner["ordinary_1"]
    checked = Version(vllm.__version__) < Version("0.33")
    assert "requires Triton" in forced if checked else forced is True
    assert runner["no_model"] is False


def test_kernels_are_swapped_in_the_worker(runner: dict[str, Any]) -> None:
    """In `init_device`, once; and the runner's module imports afterwards."""
    assert runner["before"] == 0
    assert runner["after"] == sum(map(len, STAND_INS.values()))
    assert "AttributeError" in runner["stopped"]
    assert runner["same"] and runner["runner_imports"]


@pytest.mark.long
def test_the_platform_leaves_ordinary_models_alone(tmp_path: Path) -> None:
    """Scheduling, worker, norms and the start of processes are vLLM's own but for bridged ones."""
    seen = play("choices", tmp_path)
    assert seen["platform"] == "CpuV2Platform"
    assert [seen[f"ordinary_{asked}"] for asked in (None, False, True)] == [False] * 3
    assert [seen[f"bridged_{asked}"] for asked in (None, False, True)] == [True, False, True]
    assert seen["ordinary_worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert seen["bridged_worker"] == "vllm_cpu_v2.worker.CpuV2Worker"
    assert (seen["ordinary_norms"], seen["bridged_norms"]) == (["native"], ["cpu_v2", "native"])
    assert (seen["ordinary_forked"], seen["bridged_forked"]) == (False, True)


def test_nothing_happens_on_another_platform(tmp_path: Path) -> None:
    """`from vllm import LLM` works with the start-up hook; no part, and no replaced function."""
    seen = play("elsewhere", tmp_path)
    assert seen.pop("llm") == "LLM"
    assert seen.pop("parts") == []
    assert not any(seen.values()), seen


# A diffusion model has a sampler of its own, which counts what it rejects.
NOT_LAUNCHED = {"_get_num_sampled_and_rejected_kernel"}


@pytest.mark.parametrize("module", STAND_INS)
def test_table_covers_every_kernel_that_is_launched(module: str) -> None:
    """A kernel that a later vLLM launches without a stand-in has to fail here, not in a worker."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    source = root.joinpath("v1/worker/gpu", *module.split(".")).with_suffix(".py").read_text()
    # A launch reads `kernel[grid](...)`; subscripted types are not calls with keyword tiles.
    launched = {
        node.func.value.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    swapped = {f"_{function.__name__}_kernel" for function in STAND_INS[module]}
    assert launched - NOT_LAUNCHED == swapped


def test_no_module_copies_a_kernel() -> None:
    """A module that imported a kernel by name would launch it, not the stand-in."""
    kernels = {f"_{f.__name__}_kernel" for functions in STAND_INS.values() for f in functions}
    root = Path(importlib.util.find_spec("vllm").origin).parent
    imported = {
        alias.name
        for path in (*root.glob("v1/**/*.py"), *root.glob("model_executor/models/*.py"))
        if "_kernel" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.v1.worker.gpu")
        for alias in node.names
    }
    assert imported
    assert not imported & kernels
