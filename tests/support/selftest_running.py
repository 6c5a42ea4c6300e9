"""The command in a process of its own, and the file that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CASE = "CPU_ATTN/EAGER/torch/float32/sync"


def selftest(
    *options: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`vllm-dllm selftest` with these options."""
    return subprocess.run(
        (sys.executable, "-m", "vllm_dllm.cli", "selftest", *map(str, options)),
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def cases(report: Path) -> dict[str, Any]:
    """The cases of a written report, by name."""
    return {case["name"]: case for case in json.loads(report.read_text())["cases"]}
