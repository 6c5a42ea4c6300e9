"""What the package never does, and the bounds that `SECURITY.md` promises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.commands import run
from vllm_dllm.ranges import MAX_STEPS
from vllm_dllm.settings.server import MAX_CANVAS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_dllm"

# Code or objects out of data: ruff's names of pickle, eval, exec, YAML and shells; and others.
DANGERS = "S102,S301,S302,S307,S403,S506,S602,S604,S605"
OTHERS = re.compile(r"""trust_remote_code["']|trust_remote_code\s*=|\btorch\.load\(|allow_pickle""")


def test_no_code_comes_out_of_data() -> None:
    command = (sys.executable, "-m", "ruff", "check", "--isolated", "--select", DANGERS)
    done = run(*command, PACKAGE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path for path in PACKAGE.rglob("*.py") if OTHERS.search(path.read_text())] == []


def test_the_document_states_the_bounds() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for name, value in (
        ("diffusion_max_steps", MAX_STEPS),
        ("diffusion_canvas_length", MAX_CANVAS),
        ("diffusion_seed_canvas", MAX_CANVAS),
    ):
        row = next(line for line in text.splitlines() if line.startswith("|") and name in line)
        assert f"{value:,}" in row, row
