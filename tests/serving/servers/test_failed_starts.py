"""A start that fails ends all of its processes, with exit status 1 and the reason in its output.

It is made to fail at each stage, with one worker and with two, which wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.checkpoints import ROOT, TINY_LLADA2
from tests.support.server import AS_SERVED, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

START_SECONDS, END_SECONDS = 400, 15


@dataclass(frozen=True)
class Failure:
    reason: str  # what the output must say
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
        "planted in the warm-up", {"worker_cls": "tests.support.failing_worker.FailingWorker"}
    ),
    "compile": Failure("InvalidCxxCompiler", {"enforce_eager": False}, {"CXX": "/bin/false"}),
}
QUICK = ("kv-cache", 1)
CASES = [
    pytest.param(stage, workers, marks=() if (stage, workers) == QUICK else pytest.mark.long)
    for stage in STAGES
    for workers in (1, 2)
]


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended, be it that nobody has asked for its status yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Started:
    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=sink, env=environment, cwd=ROOT, start_new_session=True
            )
        self._family: set[psutil.Process] = set()

    def left(self) -> list[psutil.Process]:
        """Those that have not ended."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # processes end while we look
                parents = {one.pid for one in self._family}
                if os.getsid(process.pid) == self.process.pid or process.ppid() in parents:
                    self._family.add(process)
        return [one for one in self._family if lives(one)]

    def wait_until(self, reached: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, (self.left(), self.log.read_text()[-4000:])
            time.sleep(0.1)

    def says(self, words: str) -> bool:
        self.left()
        return words in self.log.read_text() or self.process.poll() is not None

    def end(self) -> None:
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def start(failure: Failure, workers: int, folder: Path) -> Started:
    model = shutil.copytree(TINY_LLADA2, folder / "model")
    failure.damage(model)
    options = {"tensor_parallel_size": workers} | failure.options
    environment = AS_SERVED | {"PYTHONPATH": str(ROOT)} | failure.environment
    eager = options.pop("enforce_eager", True)
    if not eager:  # nothing may have been compiled before
        environment["VLLM_CACHE_ROOT"] = str(folder)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    server = Server(model, *flags, log=folder / "log", env=environment)
    command = [word for word in server.command if eager or word != "--enforce-eager"]
    return Started(command, server.environment, folder / "log")


@pytest.mark.parametrize(("stage", "workers"), CASES)
def test_a_failed_start_ends(stage: str, workers: int, tmp_path: Path) -> None:
    failure = STAGES[stage]
    started = start(failure, workers, tmp_path)
    try:
        started.wait_until(lambda: started.says(failure.reason), START_SECONDS)
        # A machine that is busy with other tests takes as much longer.
        slower = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        started.wait_until(
            lambda: started.process.poll() is not None and not started.left(), END_SECONDS * slower
        )
        assert started.process.returncode == 1
        assert failure.reason in started.log.read_text()
    finally:
        started.end()
