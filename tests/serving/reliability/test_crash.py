"""A server whose engine is killed, or that is asked to end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.support.checkpoints import TINY
from tests.support.server import AS_SERVED, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LLADA2, GEMMA = "tiny-llada2", "tiny-diffusiongemma"
# Every canvas takes some 40 steps, and a request many canvases.
SLOW = {
    LLADA2: {"diffusion_threshold": 2.0},
    GEMMA: {"diffusion_max_steps": 40, "diffusion_stability_threshold": 1000},
}
RUNNING, SEATS = 12, 6
LENGTH = 8192  # longer than the models were made for, because a request is to take a minute
AT_ONCE = 10  # seconds; it takes a tenth of one
PROMPT = "sort 61 35 88 14"


def server_of(model: str, log: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    longer: dict[str, Any] = {"max_position_embeddings": LENGTH}
    if model == GEMMA:
        longer = {"text_config": longer}
        flags += ("--limit-mm-per-prompt", '{"image": 0, "video": 0}')
    shape = ("--max-num-seqs", str(SEATS), "--max-model-len", str(LENGTH))
    overrides = ("--hf-overrides", json.dumps(longer))
    # Beside other tests a start takes long, and it is not what is measured.
    return Server(TINY / model, *shape, *overrides, *flags, log=log, env=env, start_seconds=300)


def until(reached: Callable[[], Any], seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, f"not reached in {seconds} s"
        time.sleep(0.02)
    return found


def engine_process(server: Server) -> psutil.Process:
    started = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = (one for one in started if "EngineCor" in one.name())
    return found


def assert_nothing_left(server: Server) -> None:
    """No process of the server's group, which is all that it started."""
    with pytest.raises(ProcessLookupError):
        until(lambda: os.killpg(server.process.pid, 0), AT_ONCE)


class Ended(NamedTuple):
    """How a request ended: a status, also of a last event, or that it was closed; and when."""

    status: str
    text: str
    reason: str
    when: float


def ask(server: Server, number: int, tokens: int) -> Ended:
    """Every other request is streamed, and every third one is a chat."""
    prompt = f"sort 6{number} 35"
    path, asked = "completions", {"prompt": prompt}
    if number % 3 == 0:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    body: dict[str, Any] = {"model": "m", "max_tokens": tokens, "stream": number % 2 == 0}
    body |= {"ignore_eos": True, "temperature": 0, "vllm_xargs": SLOW[Path(server.command[2]).name]}
    text, reason, status = "", "", ""
    try:
        url = f"{server.url}/v1/{path}"
        with httpx.stream("POST", url, json=body | asked, timeout=120) as answer:
            status = str(answer.status_code)
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith('{"error"'):
                    status = str(json.loads(data)["error"]["code"])
                elif data.startswith("{"):
                    (choice,) = json.loads(data)["choices"]
                    told = choice.get("delta") or choice.get("message") or choice
                    text += told.get("content") or told.get("text") or ""
                    reason = choice["finish_reason"] or reason
    except httpx.TransportError:
        status = "closed"
    return Ended(status, text, reason, time.monotonic())


def begin(server: Server, pool: ThreadPoolExecutor, tokens: int) -> list[Future[Ended]]:
    """Requests that all have reached the engine: some put tokens out, others wait for a seat."""
    states = ("num_requests_running", "num_requests_waiting", "request_success_total")

    def taken() -> float:
        # One read: between two, a request may end and be counted both as running and as answered.
        return server.metric(*(f"vllm:{state}" for state in states))

    before, put_out = taken(), server.metric("vllm:generation_tokens_total")
    asked = [pool.submit(ask, server, number, tokens) for number in range(RUNNING)]
    until(lambda: taken() - before >= RUNNING)
    until(lambda: server.metric("vllm:generation_tokens_total") > put_out)
    assert sum(future.done() for future in asked) <= RUNNING / 2
    return asked


def test_running_requests_are_answered(tmp_path: Path) -> None:
    """A server that is asked to end answers them for as long as ``--shutdown-timeout`` says."""
    with (
        server_of(LLADA2, tmp_path / "log", "--shutdown-timeout", "120") as server,
        ThreadPoolExecutor(RUNNING) as pool,
    ):
        alone = [ask(server, number, 240).text for number in range(2)]
        asked = begin(server, pool, 240)
        os.kill(server.process.pid, signal.SIGTERM)
        answers = [future.result() for future in asked]
        assert {(one.status, one.reason) for one in answers} == {("200", "length")}
        assert [one.text for one in answers[:2]] == alone
        assert server.process.wait(30) == 0


def newcomer(server: Server) -> list[str]:
    """What a new request and a health check hear."""
    heard, body = [], {"model": "m", "prompt": PROMPT, "max_tokens": 4}
    for method, path, sent in (("POST", "/v1/completions", body), ("GET", "/health", None)):
        try:
            answer = httpx.request(method, server.url + path, json=sent, timeout=AT_ONCE)
            heard.append(str(answer.status_code))
        except (httpx.NetworkError, httpx.RemoteProtocolError):  # no timeout, which is a hang
            heard.append("refused")
    return heard


@pytest.mark.long
@pytest.mark.parametrize("model", [LLADA2, GEMMA])
def test_a_killed_engine(model: str, tmp_path: Path) -> None:
    """Catches a client that waits forever, a truncated answer that looks whole, a server that
    stays up without an engine, processes that survive it, a restart that answers differently.
    The exit status is vLLM's, which is 0."""
    server = server_of(model, tmp_path / "log", env=AS_SERVED)
    with server, ThreadPoolExecutor(RUNNING) as pool:
        before = server.complete(PROMPT, 40, temperature=0, seed=7)
        asked = begin(server, pool, LENGTH - 100)
        core = engine_process(server)
        killed = time.monotonic()
        core.kill()
        while server.process.poll() is None:
            request, health = newcomer(server)
            assert request in ("500", "503", "refused")
            assert health in ("503", "refused") or time.monotonic() < killed + 1
            assert time.monotonic() < killed + 30
        for future in asked:
            ended = future.result()
            assert ended.status in ("closed", "500"), ended
            assert ended.when < killed + AT_ONCE
        assert newcomer(server) == ["refused", "refused"]
        assert_nothing_left(server)
    with server:  # the same command, port included
        assert server.complete(PROMPT, 40, temperature=0, seed=7) == before
