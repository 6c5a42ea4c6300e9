"""Run a function in a process of its own.

python -m tests.support.child MODULE:FUNCTION

Its arguments are a list of JSON on the standard input, and each answer that it yields is a line.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.checkpoints import ROOT
from tests.support.commands import run
from tests.support.forked import forked

ANSWER = "answer: "


def in_child(
    function: Callable[..., Iterator[Any]] | str, *arguments: Any, env: dict[str, str] | None = None
) -> list[Any]:
    """What a function of a module yields for these arguments, which are JSON or paths.

    ``MODULE:FUNCTION`` is one of a module that this process must not import. With an environment of
    its own, the process begins without vLLM.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", __name__, function]
    given = json.dumps(arguments, default=str)
    done = forked(command, given) if env is None else run(*command, input=given, env=env, cwd=ROOT)
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
