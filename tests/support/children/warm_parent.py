"""Imports what ``vllm serve`` imports, half of its start, and forks a process for each command.

A line of JSON ``{"command", "environment", "files"}`` starts one, and its process id is the answer;
``{"poll": pid}`` gets the exit status, or null while the process runs. The files are its standard
input, output and error.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import vllm.entrypoints.cli.benchmark.main
import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve


def next_command() -> dict[str, Any]:
    """Answer requests; returns in each forked process, with what it is to run."""
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if answer == 0:
                return request
        print(json.dumps(answer), flush=True)
    sys.exit()


def become(request: dict[str, Any]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    given, out, errors = request["files"]
    opened = [os.open(given, os.O_RDONLY)]
    opened += [
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND) for path in (out, errors)
    ]
    for number, file in enumerate(opened):
        os.dup2(file, number)
    sys.stdin = os.fdopen(0)  # the old one had read ahead


if __name__ == "__main__":
    request = next_command()
    become(request)
    program, *arguments = request["command"]
    if program == sys.executable:
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = request["command"]
        sys.exit(vllm.entrypoints.cli.main.main())
