"""A real ``vllm serve`` on loopback, in a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.forked import ENVIRONMENT, Forked

START_SECONDS = 120
# The value of ``--middleware`` for the live page of traces.
LIVE_PAGE = "vllm_dllm.viewer.live.LivePage"
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(1 << 26), "--served-model-name", "m"),
)
# On the CPU vLLM gives the engine's one worker a process of its own, to bind threads. To import
# vLLM there a third time takes a third of a server's start, so most tests do without that process.
AS_SERVED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# Variables that vLLM reads after its import, so that a server with them can be forked, too.
READ_LATE = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_ENABLE_RESPONSES_API_STORE",
    "VLLM_LOGGING_LEVEL",
    "VLLM_SERVER_DEV_MODE",
}


class Server:
    """Started on entry, gone on exit. The headers of `client` are those of all requests.

    With `forks` a server without environment variables of its own, but for `READ_LATE`, is forked
    from a process that has imported vLLM, to save time.
    """

    forks = False

    def __init__(
        self,
        model: Path,
        *flags: str,
        log: Path,
        env: dict[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.start_seconds = start_seconds
        vllm = str(Path(sys.executable).with_name("vllm"))
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.command = [vllm, "serve", str(model), *address, *FLAGS, *flags]
        self.environment = os.environ | ENVIRONMENT | (env or {})
        # One for all requests: to make one takes longer than most answers. Its connections are used
        # once, because the server closes idle ones, maybe while a request is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.Client(base_url=self.url, timeout=60, limits=limits)
        self.own_environment = bool((env or {}).keys() - READ_LATE)

    def __enter__(self) -> Server:
        self.launch()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start it, and leave to the caller to wait for it and to stop it."""
        self.process: subprocess.Popen[bytes] | Forked
        if self.forks and not self.own_environment:
            self.process = Forked(self.command, self.environment, out=self.log)
            return
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                self.command, stdout=sink, stderr=sink, env=self.environment, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health", timeout=1).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"server did not start:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    # ---- requests

    def post(self, path: str, **body: Any) -> httpx.Response:
        body = {"model": "m"} | body
        return self.client.post(path, json=body)

    def complete(self, prompt: list[int] | str, max_tokens: int, **body: Any) -> dict[str, Any]:
        """The first choice of a completion, with its token ids."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True} | body
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def stream(self, prompt: list[int], max_tokens: int, **body: Any) -> list[list[int]]:
        """Token ids of each event of a streamed completion."""
        return self.events("completions", prompt=prompt, max_tokens=max_tokens, **body)

    def events(self, endpoint: str, **body: Any) -> list[list[int]]:
        """Token ids of each event of a streamed answer."""
        body = {"model": "m", "return_token_ids": True, "stream": True} | body
        events = []
        with self.client.stream("POST", f"/v1/{endpoint}", json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    events += [c.get("token_ids") for c in json.loads(data)["choices"]]
        return [event for event in events if event]

    def metric(self, *names: str) -> float:
        """Sum of Prometheus metrics over their labels, all of them read at one moment."""
        lines = self.client.get("/metrics").text.splitlines()
        begins = tuple(name + "{" for name in names)
        return sum(float(ln.rsplit(" ", 1)[1]) for ln in lines if ln.startswith(begins))

    def wait_until_idle(self, seconds: float = 10) -> None:
        """No request runs or waits and no KV block is held, or fail after ``seconds``."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + seconds
        while (busy := {n: self.metric(f"vllm:{n}") for n in names}) and any(busy.values()):
            assert time.monotonic() < deadline, busy
            time.sleep(0.1)


class Pool:
    """Servers that tests share, by checkpoint and flags.

    Only the last few stay, because of their memory: ask for a server in each test that uses it.
    """

    def __init__(self, folder: Path, most: int = 2) -> None:
        """Prepare for servers, at most `most` at a time, whose logs are written into `folder`."""
        self._folder, self._most, self._started = folder, most, 0
        self._servers: dict[tuple[Any, ...], Server] = {}

    def get(self, model: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
        """The running server of a checkpoint with these flags and environment variables."""
        key = (model, flags, *sorted((env or {}).items()))
        server = self._servers.pop(key, None)
        if server is None:
            while len(self._servers) >= self._most:
                self._servers.pop(next(iter(self._servers))).stop()
            self._started += 1
            log = self._folder / f"{self._started}-{model.name}.log"
            server = Server(model, *flags, log=log, env=env).__enter__()
        self._servers[key] = server
        return server

    def stop(self) -> None:
        while self._servers:
            self._servers.popitem()[1].stop()
