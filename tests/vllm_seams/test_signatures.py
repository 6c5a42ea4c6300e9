"""The installed vLLM has every name that this package relies on, with the recorded signature."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT
from tests.vllm_seams.signatures import RECORD
from vllm_dllm.vllm_seams.table import SEAMS, page


@pytest.mark.engine
@pytest.mark.slow
def test_signatures(tmp_path: Path) -> None:
    """Look at what changed and why, then record it: see the docstring of `signatures`."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.vllm_seams.signatures", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "missing: []", "imports, also inside functions"
    assert json.loads(found.read_text()) == json.loads(RECORD.read_text()), (
        "record it anew: .venv/bin/python -m tests.vllm_seams.signatures"
    )


def test_the_table_has_every_wrap() -> None:
    """And nothing else, so that `docs/seams.md` says what of vLLM the package touches."""
    wrapped = json.loads(RECORD.read_text())["wrapped"]
    assert sorted(name for seam in SEAMS for name in seam.what) == sorted(wrapped)
    assert len(wrapped) <= 15


def test_the_page_is_the_table() -> None:
    written = (ROOT / "docs" / "seams.md").read_text("utf-8")
    assert written == page(), "python -m vllm_dllm.vllm_seams.table > docs/seams.md"
