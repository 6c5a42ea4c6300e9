"""Commands of ``vllm-dllm`` in processes of their own."""

from __future__ import annotations

import sys


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
