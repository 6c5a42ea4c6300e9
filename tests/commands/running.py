"""Commands of ``vllm-dllm`` in processes of their own, and what they cost."""

from __future__ import annotations

import resource
import sys


def command(*arguments: str, before: str = "", after: str = "") -> list[str]:
    """A command of ``vllm-dllm`` in a process of its own, between two pieces of code."""
    lines = (
        before,
        "import sys",
        "from vllm_dllm.cli import main",
        f"status = main({list(arguments)!r})",
        after,
        "sys.exit(status)",
    )
    return [sys.executable, "-c", "\n".join(lines)]


def seconds_of_children() -> float:
    """Processor time of all processes that have ended: other load does not count."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
