"""Imports what ``vllm serve`` imports, half of its start, and forks a process for each server.

A line of JSON ``{"command", "environment", "log"}`` starts a server and gets its process id;
``{"poll": pid}`` gets the exit status, or null while the process runs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import vllm.entrypoints.cli.benchmark.main
import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve


def next_server() -> dict[str, Any]:
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


def become(server: dict[str, Any]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(server["environment"])
    sink = os.open(server["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.argv[:] = server["command"]


if __name__ == "__main__":
    become(next_server())
    sys.exit(vllm.entrypoints.cli.main.main())
