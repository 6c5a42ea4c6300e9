"""The command, in this process or one of its own, and the file that it writes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import commands
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
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"} | environment
    program = (sys.executable, "-m", "vllm_dllm.cli", "selftest")
    return commands.run(*program, *options, env=environment, cwd=cwd)


def cases(report: Path) -> dict[str, Any]:
    return {case["case"]["name"]: case for case in json.loads(report.read_text())["cases"]}
