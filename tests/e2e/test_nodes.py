"""One engine on two nodes, which are two process groups on loopback.

Its answers are those of one process, and it ends as on one node: all of it, soon, with a reason.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.reliability.test_crash import assert_nothing_left
from tests.support.checkpoints import TEXT_ONLY_FLAGS, TINY, TINY_GEMMA, TINY_LLADA2
from tests.support.nodes import Nodes, last_line, processes_of
from tests.support.server import Server
from vllm_dllm.selftest.golden import CHECKPOINTS, GOLDEN, load

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

AT_ONCE = 15.0  # seconds: vLLM waits for nine of them for workers that are stuck with the dead
LAYOUTS = [
    ("llada2", "tensor"),
    ("llada2", "pipeline"),
    ("sdar", "tensor"),
    ("sdar", "pipeline"),
    ("diffusion_gemma", "tensor"),
]
RUNNING = 6
# Some 40 steps a canvas.
SLOW = {"diffusion_threshold": 2.0}
KILLED = "was killed by signal 9 (SIGKILL)"


def ask(server: Server, tokens: int) -> httpx.Response | str:
    """A completion that takes so many canvases as `tokens` fill; or what ended it."""
    body = {"prompt": "sort 61 35", "ignore_eos": True, "temperature": 0, "vllm_xargs": SLOW}
    try:
        return server.post("/v1/completions", max_tokens=tokens, return_token_ids=True, **body)
    except httpx.TransportError as error:
        return repr(error)


def token_ids(answer: httpx.Response | str) -> list[int]:
    assert isinstance(answer, httpx.Response), answer
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def begin(
    server: Server, pool: ThreadPoolExecutor, tokens: int
) -> list[Future[httpx.Response | str]]:
    """Requests, all of which run."""
    asked = [pool.submit(ask, server, tokens) for _ in range(RUNNING)]
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") < RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not any(future.done() for future in asked)
    return asked


# ---- answers


@pytest.mark.parametrize(("family", "axis"), LAYOUTS)
def test_answers_are_those_of_one_process(family: str, axis: str, tmp_path: Path) -> None:
    """The golden requests of the self-test, which one process has answered, all at once."""
    golden = load(GOLDEN, CHECKPOINTS, family)
    flags = TEXT_ONLY_FLAGS if family == "diffusion_gemma" else ()

    def answer(request: dict[str, Any]) -> list[int]:
        body = dict(request["params"])
        if "extra_args" in body:
            body["vllm_xargs"] = body.pop("extra_args")
        return nodes.first.complete(request["prompt"], body.pop("max_tokens"), **body)["token_ids"]

    with (
        Nodes(golden.checkpoint, axis, tmp_path, *flags) as nodes,
        ThreadPoolExecutor(16) as pool,
    ):
        found = list(pool.map(answer, golden.requests))
    wanted = [request["tokens"]["symmetric"] for request in golden.requests]
    differ = [
        request["id"]
        for request, one, other in zip(golden.requests, found, wanted, strict=True)
        if one != other
    ]
    assert len(wanted) >= 40
    assert not differ


def test_a_pipeline_of_diffusion_gemma_is_refused(tmp_path: Path) -> None:
    """On each node by itself, before it waits for another."""
    nodes = Nodes(TINY_GEMMA, "pipeline", tmp_path, *TEXT_ONLY_FLAGS)
    for node in (nodes.first, nodes.second):
        node.launch()
        try:
            assert node.process.wait(120) == 1
        finally:
            node.stop()
        assert last_line(node).startswith("vllm-dllm: the server cannot start: ")
        assert "--pipeline-parallel-size" in last_line(node)


def test_nodes_with_other_settings_are_refused(tmp_path: Path) -> None:
    """Each rank decodes by its own settings, so that the answers would be of neither."""
    nodes = Nodes(TINY_LLADA2, "tensor", tmp_path)
    nodes.second.command += ["--additional-config", '{"dllm": {"threshold": 0.5}}']
    try:
        nodes.launch()
        assert nodes.statuses(120) == (1, 1)
    finally:
        nodes.stop()
    for node in (nodes.first, nodes.second):
        assert "rank 1 is on a node with another --additional-config" in last_line(node)


# ---- deaths


def worker(node: Server) -> int:
    return next(n for n, name in processes_of(node).items() if name.startswith("VLLM::Worker"))


def kill_second_worker(nodes: Nodes) -> None:
    os.kill(worker(nodes.second), signal.SIGKILL)


def kill_second_main(nodes: Nodes) -> None:
    """The process that started the node's workers."""
    os.kill(nodes.second.process.pid, signal.SIGKILL)


def kill_second_node(nodes: Nodes) -> None:
    os.killpg(nodes.second.process.pid, signal.SIGKILL)


def kill_first_worker(nodes: Nodes) -> None:
    os.kill(worker(nodes.first), signal.SIGKILL)


def kill_first_engine(nodes: Nodes) -> None:
    processes = processes_of(nodes.first).items()
    os.kill(next(n for n, name in processes if "EngineCor" in name), signal.SIGKILL)


def kill_first_main(nodes: Nodes) -> None:
    """The HTTP server's process, which started the engine."""
    os.kill(nodes.first.process.pid, signal.SIGKILL)


def kill_first_node(nodes: Nodes) -> None:
    os.killpg(nodes.first.process.pid, signal.SIGKILL)


RANK_1 = "the engine died: rank 1 on node 1 (127.0.0.1, pid "
# Who is killed: the exit statuses of both nodes, and what their last lines have.
DEATHS: dict[Callable[[Nodes], None], tuple[tuple[int, int], str | None, str | None]] = {
    kill_second_worker: ((1, 1), RANK_1, KILLED),
    kill_second_main: ((1, -9), RANK_1, None),
    kill_second_node: ((1, -9), RANK_1, None),
    kill_first_worker: ((1, 1), KILLED, KILLED),
    kill_first_engine: ((1, 1), KILLED, "died or cannot be reached"),
    kill_first_main: ((-9, 1), None, "the engine on the first node died: the server (pid "),
    kill_first_node: ((-9, 1), None, "died or cannot be reached"),
}
# Under load with one axis, idle with the other.
HALF = (kill_second_main, kill_first_engine, kill_first_main)


@pytest.mark.parametrize(
    ("kill", "axis", "loaded"),
    [
        pytest.param(
            kill, axis, loaded, id=f"{kill.__name__[5:]}-{axis}-{'loaded' if loaded else 'idle'}"
        )
        for kill in DEATHS
        for axis in ("tensor", "pipeline")
        for loaded in (False, True)
        if kill not in HALF or loaded == (axis == "tensor")
    ],
)
def test_a_death_ends_both_nodes(
    kill: Callable[[Nodes], None], axis: str, loaded: bool, tmp_path: Path
) -> None:
    """Without a request, nothing happened at all; with one it took five minutes."""
    statuses, *lines = DEATHS[kill]
    with Nodes(TINY_LLADA2, axis, tmp_path) as nodes, ThreadPoolExecutor(RUNNING) as pool:
        asked = begin(nodes.first, pool, 450) if loaded else []
        killed = time.monotonic()
        kill(nodes)
        assert nodes.statuses(AT_ONCE) == statuses
        for future in asked:
            answer = future.result(1)
            assert isinstance(answer, str) or answer.status_code == 500
        assert time.monotonic() < killed + AT_ONCE + 2
        for node, line in zip((nodes.first, nodes.second), lines, strict=True):
            assert_nothing_left(node)
            if line is not None:
                assert line in last_line(node)
                assert "ends with exit status 1" in last_line(node)


# ---- ends that were asked for


def to_first(nodes: Nodes) -> None:
    os.kill(nodes.first.process.pid, signal.SIGTERM)


def to_all(nodes: Nodes) -> None:
    """As supervisors on both nodes do it."""
    for node in (nodes.first, nodes.second):
        os.killpg(node.process.pid, signal.SIGTERM)


@pytest.mark.parametrize("send", [to_first, to_all])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_running_requests_are_answered(
    axis: str, send: Callable[[Nodes], None], tmp_path: Path
) -> None:
    with Nodes(TINY_LLADA2, axis, tmp_path) as nodes, ThreadPoolExecutor(RUNNING) as pool:
        alone = token_ids(ask(nodes.first, 100))
        asked = begin(nodes.first, pool, 100)
        send(nodes)
        assert [token_ids(future.result()) for future in asked] == [alone] * RUNNING
        assert nodes.statuses(30) == (0, 0)
        assert_nothing_left(nodes.first)
        assert_nothing_left(nodes.second)


def test_a_second_node_that_is_asked_to_end_alone(tmp_path: Path) -> None:
    """It waits for the first one, as long as that one's requests may take; then both end."""
    flags = ("--shutdown-timeout", "10")
    with Nodes(TINY / "tiny-llada2", "tensor", tmp_path, *flags) as nodes:
        nodes.second.process.terminate()
        time.sleep(2)
        assert nodes.first.complete("sort 61 35", 40, temperature=0)["token_ids"]
        assert nodes.statuses(10 + AT_ONCE) == (1, 0)
        assert RANK_1 in last_line(nodes.first)
