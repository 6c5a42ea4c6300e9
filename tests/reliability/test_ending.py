"""How a server ends: asked to, it answers what runs; its engine dead, it fails and says why."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.reliability.breaking import BREAKS
from tests.reliability.test_crash import AT_ONCE, LLADA2, until
from tests.support.checkpoints import TINY
from tests.support.server import AS_SERVED, WITHIN_ENGINE, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUNNING, SEATS, TOKENS = 20, 8, 400
ROOT = str(Path(__file__).resolve().parents[2])
# Some 40 steps a canvas.
SLOW = {"diffusion_threshold": 2.0}


def serve(log: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    shape = ("--max-num-seqs", str(SEATS), "--max-model-len", "2048")
    # Beside other tests a start takes long, and it is not what is measured.
    return Server(TINY / LLADA2, *shape, *flags, log=log, env=env, start_seconds=300)


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
    names = ("num_requests_running", "num_requests_waiting", "request_success_total")

    def taken() -> float:
        return sum(server.metric(f"vllm:{name}") for name in names)

    before = taken()
    asked = [pool.submit(ask, server, number, tokens) for number in range(RUNNING)]
    until(lambda: taken() - before >= RUNNING)
    assert sum(future.done() for future in asked) <= RUNNING / 2
    return asked


def to_server(server: Server, kind: int = signal.SIGTERM) -> None:
    os.kill(server.process.pid, kind)


def to_all(server: Server) -> None:
    """As terminals and supervisors do it."""
    os.killpg(server.process.pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("send", "env"),
    [
        pytest.param(to_server, WITHIN_ENGINE, id="server"),
        pytest.param(to_all, AS_SERVED, id="every-process", marks=pytest.mark.long),
    ],
)
def test_running_requests_are_answered(
    send: Callable[[Server], None], env: dict[str, str], tmp_path: Path
) -> None:
    """They got a 500, or heard nothing at all."""
    with serve(tmp_path / "log", env=env) as server, ThreadPoolExecutor(RUNNING) as pool:
        alone = [ask(server, number, TOKENS) for number in range(2)]
        asked = begin(server, pool, TOKENS)
        send(server)

        def refused() -> bool:
            return server.post("/v1/completions", prompt="a", max_tokens=4).status_code == 503

        until(refused, 5)
        streamed = server.post("/v1/completions", prompt="a", max_tokens=4, stream=True)
        assert streamed.status_code == 503
        assert "shutting down" in streamed.text
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 503
        answers = [future.result() for future in asked]
        assert [(status, reason) for status, _, reason in answers] == [("200", "length")] * RUNNING
        assert answers[:2] == alone
        assert server.process.wait(30) == 0


def test_a_second_signal_ends_them_at_once(tmp_path: Path) -> None:
    with serve(tmp_path / "log") as server, ThreadPoolExecutor(RUNNING) as pool:
        asked = begin(server, pool, 1600)
        to_server(server)
        time.sleep(1)
        assert not any(future.done() for future in asked)
        to_server(server, signal.SIGINT)
        second = time.monotonic()
        assert {future.result()[0] for future in asked} == {"503"}
        assert server.process.wait(AT_ONCE) == 0
        assert time.monotonic() < second + AT_ONCE


@pytest.mark.long
@pytest.mark.parametrize("seconds", [2, 0])
def test_what_the_user_gives_them_holds(seconds: int, tmp_path: Path) -> None:
    """Zero, too, which is vLLM's own default: it must be told from a flag that was not given."""
    server = serve(tmp_path / "log", "--shutdown-timeout", str(seconds))
    with server, ThreadPoolExecutor(RUNNING) as pool:
        asked = begin(server, pool, 1600)
        sent = time.monotonic()
        to_server(server)
        assert {future.result()[0] for future in asked} == {"503"}
        assert seconds <= time.monotonic() - sent < seconds + AT_ONCE
        assert server.process.wait(30) == 0


def child_named(server: Server, beginning: str) -> int:
    """The id of a process of the server's group."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = entry.joinpath("stat").read_text().split("(")[1].split(")")[0]
            if name.startswith(beginning) and os.getpgid(int(entry.name)) == server.process.pid:
                return int(entry.name)
        except OSError:  # processes end while we look
            continue
    raise AssertionError(f"no process {beginning}")


def break_it(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 4, "vllm_xargs": {"diffusion_threshold": BREAKS}}
    assert server.post("/v1/completions", **body).status_code == 500


def kill_engine(server: Server) -> None:
    os.kill(child_named(server, "VLLM::EngineCor"), signal.SIGKILL)


def kill_worker(server: Server) -> None:
    os.kill(child_named(server, "VLLM::Worker"), signal.SIGKILL)


FLAGS = ("--additional-config", '{"dllm": {"algorithm": "tests.reliability.breaking:Breaking"}}')


@pytest.mark.parametrize(
    ("fault", "env", "cause"),
    [
        pytest.param(break_it, WITHIN_ENGINE, "ArithmeticError: the sum of all", id="exception"),
        # `test_crash.py` looks at most of this one, too.
        pytest.param(
            kill_engine, WITHIN_ENGINE, "EngineCore", id="killed-engine", marks=pytest.mark.long
        ),
        pytest.param(
            kill_worker, AS_SERVED, "signal 9 (SIGKILL)", id="killed-worker", marks=pytest.mark.long
        ),
    ],
)
def test_a_dead_engine_is_a_failure_with_a_cause(
    fault: Callable[[Server], None], env: dict[str, str], cause: str, tmp_path: Path
) -> None:
    """The exit status was 0, and the log's last line about leaked references."""
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    with serve(tmp_path / "log", *FLAGS, env={**env, "PYTHONPATH": path}) as server:
        dead = time.monotonic()
        fault(server)
        assert server.process.wait(2 * AT_ONCE) == 1
        assert time.monotonic() < dead + AT_ONCE
        time.sleep(1)  # for whoever else would write
        last = server.log.read_text().rstrip().splitlines()[-1]
        assert "dllm: the engine died: " in last
        assert cause in last
