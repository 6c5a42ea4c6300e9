"""The installed vLLM has every name that this package relies on, with the recorded signature."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm_patches.signatures import RECORD


@pytest.mark.engine
@pytest.mark.slow
def test_signatures(tmp_path: Path) -> None:
    """Look at what changed and why, then record it: see the docstring of `signatures`."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.vllm_patches.signatures", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "missing: []", "imports, also inside functions"
    recorded = json.loads(RECORD.read_text())
    changed = {
        name: f"{recorded[group].get(name)} -> {signature}"
        for group, names in json.loads(found.read_text()).items()
        for name, signature in names.items()
        if recorded[group].get(name) != signature
    }
    assert changed == {}, "record it anew: .venv/bin/python -m tests.vllm_patches.signatures"
