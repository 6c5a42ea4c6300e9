"""Run a function in a process of its own.

python -m tests.support.child MODULE:FUNCTION

Its arguments are a list of JSON on the standard input, and each answer that it yields is a line.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "answer: "


def in_child(
    function: Callable[..., Iterator[Any]], *arguments: Any, env: dict[str, str] | None = None
) -> list[Any]:
    """What a function of a module yields for these arguments, which are JSON or paths."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, f"{function.__module__}:{function.__qualname__}"],
        input=json.dumps(arguments, default=str),
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return [json.loads(line.removeprefix(ANSWER)) for line in lines if line.startswith(ANSWER)]


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    for answer in function(*json.load(sys.stdin)):
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
