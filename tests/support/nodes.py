"""Two real `vllm serve` on loopback that are the nodes of one engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support.server import AS_SERVED, Server

START_SECONDS = 300
ON_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class Nodes:
    """Started on entry, gone on exit.

    Attributes:
        first: the node with the engine and the HTTP server.
        second: the node with workers only, in a process group of its own.
    """

    def __init__(self, model: Path, axis: str, folder: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env = AS_SERVED | ON_LOOPBACK
        shared = (
            *(f"--{axis}-parallel-size", "2", "--nnodes", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", port, *flags),
        )
        first, second = ("--node-rank", "0"), ("--node-rank", "1", "--headless")
        self.first = Server(
            model, *shared, *first, log=folder / "first", env=env, start_seconds=START_SECONDS
        )
        self.second = Server(model, *shared, *second, log=folder / "second", env=env)

    def __enter__(self) -> Nodes:
        self.launch()
        try:
            self.first.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start both, and leave to the caller to wait for them and to stop them."""
        self.first.launch()
        self.second.launch()

    def stop(self) -> None:
        """End what has not ended by itself. A test that expects an end looks before."""
        for node in (self.second, self.first):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait(20)

    def statuses(self, seconds: float) -> tuple[int, int]:
        """The exit statuses of both, which have so long to end."""
        deadline = time.monotonic() + seconds
        found = []
        for name, node in (("first", self.first), ("second", self.second)):
            try:
                found.append(node.process.wait(max(deadline - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"the {name} node runs after {seconds} s:\n{node.log.read_text()[-2000:]}"
                ) from None
        time.sleep(1)  # for whoever else would write
        return found[0], found[1]


def last_line(node: Server) -> str:
    """The last line of a node's log."""
    return node.log.read_text().rstrip().splitlines()[-1]


def processes_of(node: Server) -> dict[int, str]:
    """The processes of a node's group: their names by their ids."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes end while we look
            if os.getpgid(int(entry.name)) == node.process.pid:
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found
