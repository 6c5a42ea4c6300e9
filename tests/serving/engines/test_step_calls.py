"""A steady step stays as straight as it is: few calls between files, in few files."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.checkpoints import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = ROOT / "scripts" / "count_step_calls.py"


@pytest.mark.parametrize(
    ("family", "files"),
    [("llada2", 10), pytest.param("diffusion_gemma", 16, marks=pytest.mark.long)],
)
def test_calls_of_a_steady_step(family: str, files: int) -> None:
    """Fails for a detour through another file, and where the script counts nothing."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), family, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    counted = re.search(rf"^{family}: (\d+) calls .* in (\d+) files", done.stdout, re.MULTILINE)
    assert counted is not None
    calls, entered = map(int, counted.groups())
    assert files - 3 <= entered <= calls
