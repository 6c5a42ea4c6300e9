"""A server that is asked to end answers what runs, for as long as ``--shutdown-timeout`` says."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.reliability.test_crash import LLADA2, until
from tests.support.checkpoints import TINY
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUNNING, SEATS, TOKENS = 12, 6, 240
# Some 40 steps a canvas.
SLOW = {"diffusion_threshold": 2.0}


def serve(log: Path, *flags: str) -> Server:
    shape = ("--max-num-seqs", str(SEATS), "--max-model-len", "2048")
    # Beside other tests a start takes long, and it is not what is measured.
    return Server(TINY / LLADA2, *shape, *flags, log=log, start_seconds=300)


def ask(server: Server, number: int, tokens: int) -> tuple[str, str, str]:
    """(status or what else ended it, text, finish reason); every other request is streamed."""
    body: dict[str, Any] = {"model": "m", "prompt": f"sort 6{number} 35", "max_tokens": tokens}
    body |= {"ignore_eos": True, "temperature": 0, "vllm_xargs": SLOW, "stream": number % 2 == 0}
    text, reason, status = "", "", ""
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
            status = str(answer.status_code)
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith('{"error"'):
                    status = str(json.loads(data)["error"]["code"])
                elif data.startswith("{"):
                    (choice,) = json.loads(data)["choices"]
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
    except httpx.TransportError as error:
        status = repr(error)
    return status, text, reason


def begin(
    server: Server, pool: ThreadPoolExecutor, tokens: int
) -> list[Future[tuple[str, str, str]]]:
    """Requests that all have reached the engine: some run, the others wait there for a seat."""
    states = ("num_requests_running", "num_requests_waiting", "request_success_total")

    def taken() -> float:
        # One read: between two, a request may end and be counted both as running and as answered.
        return server.metric(*(f"vllm:{state}" for state in states))

    before = taken()
    asked = [pool.submit(ask, server, number, tokens) for number in range(RUNNING)]
    until(lambda: taken() - before >= RUNNING)
    assert sum(future.done() for future in asked) <= RUNNING / 2
    return asked


def test_running_requests_are_answered(tmp_path: Path) -> None:
    with (
        serve(tmp_path / "log", "--shutdown-timeout", "120") as server,
        ThreadPoolExecutor(RUNNING) as pool,
    ):
        alone = [ask(server, number, TOKENS) for number in range(2)]
        asked = begin(server, pool, TOKENS)
        os.kill(server.process.pid, signal.SIGTERM)
        answers = [future.result() for future in asked]
        assert [(status, reason) for status, _, reason in answers] == [("200", "length")] * RUNNING
        assert answers[:2] == alone
        assert server.process.wait(30) == 0
