"""The command, in this process or one of its own, and the file that it writes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_dllm.selftest import command

CASE = "CPU_ATTN/EAGER/torch/float32/sync"


def run(*options: str | Path) -> int:
    """The command in this process; returns its exit status."""
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return command.run(parser.parse_args([*map(str, options)]))


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
    return {case["case"]["name"]: case for case in json.loads(report.read_text())["cases"]}
