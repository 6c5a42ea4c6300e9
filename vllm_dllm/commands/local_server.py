"""Run a real ``vllm serve`` on a free loopback port, and send it requests as a small client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The models that ship with the package.
TINY = Path(__file__).resolve().parents[1] / "selftest" / "checkpoints"
START_SECONDS = 240
STOP_SECONDS = 15
SERVED_NAME = "demo"
# The text after "LEVEL date time [file:line]".
MESSAGE = re.compile(r"[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^]\n]+\] (.*)")


class ServerError(RuntimeError):
    """The server did not start or did not answer."""


def model_help() -> str:
    """Say what `serve` takes as a model."""
    return f"a name, a path, or one of {', '.join(sorted(place.name for place in TINY.iterdir()))}"


@contextlib.contextmanager
def serve(model: str, *flags: str) -> Iterator[str]:
    """Yield a running server's address; the server ends with the block.

    `model` may also be the name of one in `TINY`. Raises `ServerError` with the end of the log if
    the server does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = str(TINY / model) if (TINY / model).is_dir() else model
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", model),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME),
        *("--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"),
        *flags,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # By default vLLM would reserve most of the memory for the KV cache.
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    print(f"starting: vllm serve {Path(model).name if os.path.exists(model) else model}")
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-") as folder:
        log = Path(folder, "server.log")
        with log.open("w") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=sink, env=environment, start_new_session=True
            )
            try:
                wait_until_ready(f"http://127.0.0.1:{port}", process, log)
                yield f"http://127.0.0.1:{port}"
            finally:
                stop(process)
                print("server stopped")


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers; meanwhile show the seconds and what it is doing."""
    begin = time.monotonic()
    while time.monotonic() - begin < START_SECONDS:
        if process.poll() is not None:
            raise ServerError(f"\nthe server stopped while starting:\n{tail(log, 30)}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            renew = "\r\033[K" if sys.stdout.isatty() else ""
            print(f"{renew}ready after {time.monotonic() - begin:.0f} s")
            return
        show_progress(time.monotonic() - begin, last_message(log))
        time.sleep(0.5)
    raise ServerError(f"\nthe server was not ready after {START_SECONDS} s:\n{tail(log, 30)}")


def last_message(log: Path) -> str:
    """The beginning of vLLM's last message; warnings of Python and others write to its log, too."""
    found = MESSAGE.findall(log.read_text(errors="replace"))
    return found[-1].strip()[:60] if found else ""


def show_progress(seconds: float, phase: str) -> None:
    """Show one line that is updated in place; if the output is a file, a line every ten seconds."""
    if sys.stdout.isatty():
        print(f"\r\033[K{seconds:4.0f} s  {phase}", end="", flush=True)
    elif seconds % 10 < 0.5:
        print(f"{seconds:4.0f} s  {phase}", flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process group of the server and its workers: SIGINT first, SIGKILL last."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a worker that outlived the server


def stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    with _open(url, body) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer; raises `ServerError` with the server's message if it refuses."""
    with _open(url, body) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def _open(url: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), header)
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=120)
        return response
    except urllib.error.HTTPError as error:
        raise ServerError(f"\nHTTP {error.code}: {error.read().decode()}") from error


def read_counter(url: str, name: str) -> float:
    """The value of a Prometheus counter; 0 if the server has not counted anything yet."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def tail(log: Path, lines: int) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
