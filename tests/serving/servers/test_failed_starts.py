"""A start that fails ends all of its processes, with exit status 1 and the reason in its output.

A failure is tried at each stage of a start, with one worker and with two, which wait for each
other, under ``vllm serve`` and in a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.server import AS_SERVED, ENVIRONMENT, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

START_SECONDS, END_SECONDS = 400, 15
OFFLINE = """
import json, sys
from vllm import LLM

if __name__ == "__main__":
    LLM(**json.loads(sys.argv[1]))
"""


@dataclass(frozen=True)
class Failure:
    """How a start is made to fail.

    Attributes:
        reason: what the output must say.
        options: of the engine.
        environment: of all processes.
        damage: what is done to the checkpoint.
    """

    reason: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    damage: Callable[[Path], object] = lambda checkpoint: None


def cut(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


STAGES = {
    "load": Failure("SafetensorError", damage=cut),
    "profiling": Failure("Decrease --kv-cache-memory-bytes", {"kv_cache_memory_bytes": 1 << 50}),
    "kv-cache": Failure(
        "KV cache is needed", {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 1024}
    ),
    "warm-up": Failure(
        "planted in the warm-up",
        {"worker_cls": "tests.support.failing_worker.FailingWorker"},
    ),
    "compile": Failure("InvalidCxxCompiler", {"enforce_eager": False}, {"CXX": "/bin/false"}),
}
QUICK = [("kv-cache", 1, "served")]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.long)
    for stage in STAGES
    for case in [(stage, 1, "served"), (stage, 2, "offline")]
]


def alive() -> dict[int, tuple[int, int, str]]:
    """Parent, session and start time of each process that has not ended, by its id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes end while we look
            fields = entry.joinpath("stat").read_text().rpartition(") ")[2].split()
            if fields[0] != "Z":
                found[int(entry.name)] = int(fields[1]), int(fields[3]), fields[19]
    return found


class Started:
    """A process, and all that descend from it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=sink,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        self._family: set[tuple[int, str]] = set()

    def left(self) -> list[int]:
        """The ids of those that have not ended."""
        processes, known = alive(), {pid for pid, _ in self._family} | {self.process.pid}
        more = True
        while more:
            more = False
            for pid, (parent, session, began) in processes.items():
                if (pid, began) not in self._family and (
                    parent in known or session == self.process.pid
                ):
                    self._family.add((pid, began))
                    known.add(pid)
                    more = True
        return [pid for pid, began in self._family if processes.get(pid, ("",))[-1] == began]

    def wait_until(self, reached: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, (self.left(), self.log.read_text()[-4000:])
            time.sleep(0.1)

    def says(self, words: str) -> bool:
        self.left()
        return words in self.log.read_text() or self.process.poll() is not None

    def end(self) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def start(failure: Failure, workers: int, way: str, folder: Path) -> Started:
    model = shutil.copytree(TINY_LLADA2, folder / "model")
    failure.damage(model)
    options = {"enforce_eager": True, "tensor_parallel_size": workers} | failure.options
    environment = AS_SERVED | {"PYTHONPATH": str(ROOT)} | failure.environment
    if not options["enforce_eager"]:  # nothing may have been compiled before
        environment["VLLM_CACHE_ROOT"] = str(folder)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    if way == "served":
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        flags = [flag.removesuffix("=True") for flag in flags if not flag.endswith("=False")]
        server = Server(model, *flags, log=folder / "log", env=environment)
        eager = options["enforce_eager"]
        command = [word for word in server.command if eager or word != "--enforce-eager"]
        return Started(command, server.environment, folder / "log")
    base = {"model": str(model), "max_model_len": 512, "dtype": "float32"}
    base |= {"kv_cache_memory_bytes": 1 << 26}
    command = [sys.executable, "-c", OFFLINE, json.dumps(base | options)]
    return Started(command, os.environ | ENVIRONMENT | environment, folder / "log")


@pytest.mark.parametrize(("stage", "workers", "way"), CASES)
def test_a_failed_start_ends(stage: str, workers: int, way: str, tmp_path: Path) -> None:
    failure = STAGES[stage]
    started = start(failure, workers, way, tmp_path)
    try:
        started.wait_until(lambda: started.says(failure.reason), START_SECONDS)
        # A machine that is busy with other tests takes as much longer.
        slower = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        started.wait_until(
            lambda: started.process.poll() is not None and not started.left(),
            END_SECONDS * slower,
        )
        assert started.process.returncode == 1
        assert failure.reason in started.log.read_text()
    finally:
        started.end()
