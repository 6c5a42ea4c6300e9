"""The whole path on one machine: a real ``vllm serve``, chat requests, streamed answers.

    make demo
    make demo MODEL=tiny-sdar
    .venv/bin/python examples/demo.py --model inclusionAI/LLaDA2.0-mini --prompt "Hello"

Starts the server on a free loopback port, waits for it, streams the answers and shuts the
server down, also on Ctrl-C. Without ``--model`` it serves ``tiny-llada2``, a model of 1.6
million parameters that was trained on sums, lists and copies (``examples/tiny``); the other
models of that folder are known by their names, too.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
START_SECONDS = 180
STOP_SECONDS = 15
STEPS = "vllm:diffusion_num_denoising_steps_total"
TINY = ROOT / "examples" / "tiny" / "checkpoints"
PROMPTS = ("64 + 28", "sort 61 35 88 14", "reverse 52 97 23 71 40", "copy diffusion2026")


class ServerError(RuntimeError):
    """The server did not start, or gave no answer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny-llada2", help="checkpoint; default: tiny-llada2")
    parser.add_argument("--prompt", action="append", help="may be repeated; default: four tasks")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    try:
        tiny = TINY / args.model
        with serve(str(tiny) if tiny.is_dir() else args.model) as url:
            for prompt in args.prompt or PROMPTS:
                chat(url, prompt, args.max_tokens)
        print("server stopped")
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted; server stopped")
        return 130
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1


@contextlib.contextmanager
def serve(model: str, *flags: str, max_num_seqs: int = 8) -> Iterator[str]:
    """A running server's address; the server is gone when the block is left.

    `flags` go to ``vllm serve``. Raises `ServerError` with the end of the log if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    CACHE.mkdir(exist_ok=True)
    log = CACHE / "demo-server.log"
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", model),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"),
        *("--max-model-len", "1024", "--max-num-seqs", str(max_num_seqs), "--enforce-eager"),
        *flags,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # One gigabyte of KV cache is plenty here; vLLM would reserve most of the memory.
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    print(f"starting: vllm serve {Path(model).name if os.path.exists(model) else model}")
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=environment, start_new_session=True
        )
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers; show the seconds and what it is doing meanwhile."""
    begin = time.monotonic()
    while time.monotonic() - begin < START_SECONDS:
        if process.poll() is not None:
            raise ServerError(f"\nthe server stopped while starting:\n{tail(log, 30)}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            renew = "\r\033[K" if sys.stdout.isatty() else ""
            print(f"{renew}ready after {time.monotonic() - begin:.0f} s")
            return
        show_progress(time.monotonic() - begin, tail(log, 1))
        time.sleep(0.5)
    raise ServerError(f"\nthe server was not ready after {START_SECONDS} s:\n{tail(log, 30)}")


def show_progress(seconds: float, last_line: str) -> None:
    """One line that renews itself; where the output is a file, a line every ten seconds."""
    # The text behind vLLM's "(process) LEVEL date time [file:line]".
    phase = re.sub(r"^.*?\] ", "", last_line).strip()[:60]
    if sys.stdout.isatty():
        print(f"\r\033[K{seconds:4.0f} s  {phase}", end="", flush=True)
    elif seconds % 10 < 0.5:
        print(f"{seconds:4.0f} s  {phase}", flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, politely at first, by process group."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a worker that outlived the server


def chat(url: str, prompt: str, max_tokens: int) -> None:
    """Send one chat request, print the answer as it arrives, then a summary."""
    print(f"\nuser:      {prompt}\nassistant: ", end="", flush=True)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    steps = read_counter(url, STEPS)
    begin = time.monotonic()
    tokens = 0
    for event in stream(f"{url}/v1/chat/completions", body):
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    seconds = time.monotonic() - begin
    steps = read_counter(url, STEPS) - steps
    rate = f"{tokens / steps:.2f} tokens per step, " if steps else ""
    passes = f"{steps:.0f} step" + ("" if steps == 1 else "s")
    print(f"\n           {tokens} tokens in {passes}: {rate}{seconds:.2f} s")


def stream(url: str, body: dict[str, object]) -> Iterator[dict]:
    """The events of a streamed answer."""
    with _open(url, body) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)


def post(url: str, body: dict[str, object]) -> dict:
    """A whole answer. Raises `ServerError` with the server's words if it refuses."""
    with _open(url, body) as response:
        return json.load(response)


def _open(url: str, body: dict[str, object]) -> http.client.HTTPResponse:
    header = {"Content-Type": "application/json"}
    try:
        return urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), header), timeout=120
        )
    except urllib.error.HTTPError as error:
        raise ServerError(f"\nHTTP {error.code}: {error.read().decode()}") from error


def read_counter(url: str, name: str) -> float:
    """The value of a Prometheus counter, 0 while the server has not counted yet."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def tail(log: Path, lines: int) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
