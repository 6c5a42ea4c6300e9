"""``vllm-dllm check``: what is installed, and an exit status that scripts can rely on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from examples.tiny.make_twin import make_twin
from tests.support.checkpoints import ROOT, TINY
from vllm_dllm.vllm_patches import versions


def check(code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """`vllm-dllm check` in a process of its own, after ``code``."""
    script = f"{code}\nimport sys\nfrom vllm_dllm.cli import main\nsys.exit(main(['check']))"
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_working_installation() -> None:
    done = check()
    assert done.returncode == 0, done.stderr
    for line in ("vllm-dllm ", "vllm ", "platform ", "bridged ", "architectures  LLaDA2MoeModelLM"):
        assert line in done.stdout
    assert "ready" in done.stdout


def test_plugin_switched_off() -> None:
    done = check(VLLM_PLUGINS="")
    assert done.returncode == 1
    assert "VLLM_PLUGINS=''" in done.stderr


def test_unsupported_vllm() -> None:
    done = check("import vllm_dllm.vllm_patches.versions as v; v.vllm_version = lambda: '0.99.0'")
    assert done.returncode == 1
    assert "vLLM 0.99.0 is not supported (it has not been tested; needs >=" in done.stderr


def test_a_plugin_that_cannot_register() -> None:
    code = """
from vllm_dllm.vllm_patches import registration
def fail(): raise RuntimeError('boom')
registration.register_models = fail
"""
    done = check(code)
    assert done.returncode == 1
    assert "RuntimeError: boom" in done.stderr


def show_config(
    model: str | Path, settings: dict[str, Any], *more: str, **env: str
) -> subprocess.CompletedProcess[str]:
    section = json.dumps({"dllm": settings})
    script = "import sys\nfrom vllm_dllm.cli import main\nsys.exit(main(sys.argv[1:]))"
    asked = ("show-config", str(TINY / model), "--additional-config", section, *more)
    return subprocess.run(
        [sys.executable, "-c", script, *asked],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.engine
@pytest.mark.slow
def test_show_config() -> None:
    done = show_config("tiny-llada2", {"algorithm": "JointThreshold-Q", "threshold": 0.6})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["algorithm", "JointThreshold", "server"] in lines
    assert ["threshold", "0.6", "server"] in lines
    assert ["edit_threshold", "0.5", "server"] in lines
    assert ["penalty_lambda", "0", "default"] in lines
    assert ["execution", "fdfo", "default"] in lines
    assert ["canvas_length", "32", "checkpoint"] in lines
    done = show_config("tiny-diffusiongemma", {"execution": "sync"})
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["entropy_bound", "0.1", "checkpoint"] in lines
    assert ["max_steps", "32", "checkpoint"] in lines
    assert ["execution", "sync", "server"] in lines
    assert ["canvas_length", "32", "checkpoint"] in lines


@pytest.mark.engine
def test_a_diffusion_config_may_leave_the_canvas_length_to_the_checkpoint() -> None:
    own = ("--diffusion-config", '{"max_denoising_steps": 5}')
    lines = [
        line.split() for line in show_config("tiny-diffusiongemma", {}, *own).stdout.splitlines()
    ]
    assert ["max_steps", "5", "server"] in lines
    assert ["canvas_length", "32", "checkpoint"] in lines


@pytest.mark.engine
def test_show_config_of_a_checkpoint_that_leaves_things_open(tmp_path: Path) -> None:
    """The canvas length is the model's default, until ``--diffusion-config`` names one."""
    model = make_twin(tmp_path / "twin")
    lines = [line.split() for line in show_config(model, {}).stdout.splitlines()]
    assert ["canvas_length", "32", "default"] in lines
    own = ("--diffusion-config", '{"canvas_length": 16, "max_denoising_steps": 9}')
    done = show_config(model, {"execution": "fdfo"}, *own)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["canvas_length", "16", "server"] in lines
    assert ["max_steps", "9", "server"] in lines
    assert ["execution", "fdfo", "server"] in lines


@pytest.mark.engine
def test_an_algorithm_by_its_path_has_settings() -> None:
    """They are unknown until the path is imported, which must come first."""
    package = Path(__file__).parent / "packages" / "half_at_a_time"
    settings = {"algorithm": "half_at_a_time:HalfAtATime", "share": 0.25}
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    done = show_config("tiny-llada2", settings, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["algorithm", "HalfAtATime", "server"] in lines
    assert ["share", "0.25", "server"] in lines


@pytest.mark.engine
def test_show_config_refuses() -> None:
    done = show_config("tiny-llada2", {"treshold": 0.6})
    assert done.returncode == 1
    assert "did you mean 'threshold'" in done.stderr


def test_pip_takes_the_versions_that_are_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [r for r in map(Requirement, project["dependencies"]) if r.name == "vllm"]
    assert [r.specifier for r in wanted] == [SpecifierSet(versions.supported_versions())]


def test_version_bounds(monkeypatch) -> None:
    for version, fine in (
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.1.dev2+g1", True),
        ("0.31.9", False),
        ("0.33.0", False),
        ("1.0", False),
        ("weird", False),
        (None, False),
    ):
        monkeypatch.setattr(versions, "vllm_version", lambda version=version: version)
        assert (versions.version_problem() is None) == fine, version
