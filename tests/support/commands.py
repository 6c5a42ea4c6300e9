"""Commands in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command to its end, with what it printed."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def command(*arguments: str, before: str = "") -> list[str]:
    """A command of ``vllm-dllm`` in a process of its own, after a piece of code."""
    lines = (
        before,
        "import sys",
        "from vllm_dllm.cli import main",
        f"status = main({list(arguments)!r})",
        "sys.exit(status)",
    )
    return [sys.executable, "-c", "\n".join(lines)]
