"""The installed vLLM has every name that this package relies on, with the recorded signature."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT
from tests.vllm_seams.signatures import RECORD


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


def test_the_page_has_every_wrap() -> None:
    """And nothing else, so that `docs/seams.md` says what of vLLM the package touches."""
    wrapped = [name.partition(":")[2] for name in json.loads(RECORD.read_text())["wrapped"]]
    page = (ROOT / "docs" / "seams.md").read_text("utf-8")
    headings = re.findall("^## (`.*)$", page, re.MULTILINE)
    assert sorted(re.findall("`(.*?)`", " ".join(headings))) == sorted(wrapped)
    assert f"wraps {len(wrapped)} functions" in page
    assert len(wrapped) <= 15
