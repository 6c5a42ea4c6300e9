"""``vllm-dllm check``: what is installed, and an exit status that scripts can rely on."""

from __future__ import annotations

import os
import subprocess
import sys

from vllm_dllm import compat


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
    done = check("import vllm_dllm.compat as c; c.vllm_version = lambda: '0.99.0'")
    assert done.returncode == 1
    assert "vLLM 0.99.0 is not supported (needs >=" in done.stderr


def test_a_plugin_that_cannot_register() -> None:
    code = (
        "import vllm_dllm.compat as c\ndef f(): raise RuntimeError('boom')\nc.register_models = f"
    )
    done = check(code)
    assert done.returncode == 1
    assert "RuntimeError: boom" in done.stderr


def test_version_bounds(monkeypatch) -> None:
    for version, fine in (
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1.dev2+g1", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("1.0", False),
        ("weird", False),
        (None, False),
    ):
        monkeypatch.setattr(compat, "vllm_version", lambda version=version: version)
        assert (compat.version_problem() is None) == fine, version
