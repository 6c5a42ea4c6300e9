"""Replicas on two nodes (on loopback) give what one engine gives, and end together.

LLaDA2 and DiffusionGemma have experts, whose replicas meet in every expert layer: one without
requests takes part in the steps of the other. SDAR's dense replicas know nothing of each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.replicas import (
    LAYOUTS,
    MODELS,
    Replicas,
    Replicated,
    ask_all,
    compared,
    last_line,
    mixed,
    process_named,
    replicas,
)
from tests.support.server import AS_SERVED, Server
from tests.support.soak.client import FAILED, Client, Outcome, session
from tests.support.soak.requests import Ask, Sending

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

REQUESTS, AT_ONCE = 60, 16
LENGTH = 8192  # longer than the models were made for, because a request is to take a minute
SLOW = {
    "mask": {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 2.0},
    "uniform": {"diffusion_max_steps": 40, "diffusion_stability_threshold": 1000},
}
ENDED_SECONDS = 10
LONG_ASKS = 12


@cache
def alone(name: str) -> list[Outcome]:
    """What one plain engine answers to the requests."""
    model = MODELS[name]
    log = Path(os.devnull)
    with Server(model.path, *model.flags, log=log, env=AS_SERVED, start_seconds=400) as server:
        return asyncio.run(ask_all([server], mixed(REQUESTS, model.corruption), AT_ONCE))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in ("llada2", "gemma") for layout in ("headless", "external")),
        ("llada2", "headless, two servers"),
        # Its servers choose among two ranks each, which needs four.
        ("llada2", "hybrid"),
        ("sdar", "headless"),
        ("sdar", "hybrid"),
    ],
)
def test_replicas_answer_as_one_engine(name: str, layout: str, tmp_path: Path) -> None:
    model = MODELS[name]
    sendings = mixed(REQUESTS, model.corruption)
    with replicas(model, LAYOUTS[layout], tmp_path) as running:
        if layout == "external":
            # Nothing comes to the second rank: it holds half of every expert all the same.
            few = asyncio.run(ask_all(running.front_ends[:1], sendings[:10], AT_ONCE))
            assert not compared(few, alone(name)[:10]).different
            assert running.served().get(1, 0) == 0
        outcomes = asyncio.run(ask_all(running.front_ends, sendings, AT_ONCE))
        served = running.served()
    assert not compared(outcomes, alone(name)).different
    assert len(served) == LAYOUTS[layout].ranks
    assert min(served.values()) > 0


def long_lasting(model: Replicated) -> tuple[Replicated, list[Sending]]:
    """The model with a longer context, and requests that take a minute, half of them streamed."""
    longer = {"max_position_embeddings": LENGTH}
    overrides = {"text_config": longer} if model.corruption == "uniform" else longer
    flags = ("--max-model-len", str(LENGTH), "--hf-overrides", json.dumps(overrides))
    body = {"prompt": "sort 61 35 88 14", "ignore_eos": True, "temperature": 0, "seed": 1}
    body |= {"vllm_xargs": SLOW[model.corruption], "max_tokens": LENGTH - 100}
    asks = [Ask(str(n), "/v1/completions", body) for n in range(LONG_ASKS)]
    sendings = [Sending(n, ask, n // 2 % 2 == 0) for n, ask in enumerate(asks)]
    return replace(model, flags=model.flags + flags), sendings


async def kill_under_load(
    running: Replicas, sendings: list[Sending], victim: int
) -> tuple[int, list[tuple[Outcome, float]]]:
    """Kill the engine of a node while all requests run.

    Returns:
        Its process id; each outcome with the seconds from the killing to it.
    """
    killed = 0.0

    async def ask(client: Client, sending: Sending) -> tuple[Outcome, float]:
        outcome = await client.send(sending)
        return outcome, time.monotonic() - killed

    async with session() as opened:
        clients = [Client(server.url, opened) for server in running.front_ends]
        asked = [asyncio.create_task(ask(clients[s.number % len(clients)], s)) for s in sendings]
        while sum([server.metric("vllm:num_requests_running") for server in running.front_ends]) < (
            len(sendings)
        ):
            await asyncio.sleep(0.2)
        assert not any(task.done() for task in asked)
        pid = process_named(running.nodes[victim], "VLLM::EngineCore")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return pid, await asyncio.gather(*asked)


@pytest.mark.parametrize(
    ("name", "layout", "victim"),
    [
        ("llada2", "headless", 0),
        ("llada2", "headless", 1),
        ("llada2", "external", 1),
        ("gemma", "headless", 1),
        # Its ranks have nothing to do with each other: only a lost connection tells of its end.
        ("sdar", "headless", 1),
    ],
)
def test_a_killed_replica(name: str, layout: str, victim: int, tmp_path: Path) -> None:
    """Every request that runs fails with status 500, or an error event in its stream, and every
    node ends with status 1 and a last line that names a rank; none hangs, and none stays."""
    model, sendings = long_lasting(MODELS[name])
    with replicas(model, LAYOUTS[layout], tmp_path) as running:
        pid, outcomes = asyncio.run(kill_under_load(running, sendings, victim))
        died = time.monotonic()
        for outcome, seconds in outcomes:
            assert outcome.status == FAILED, outcome
            assert "status 500" in outcome.detail, outcome
            assert seconds < ENDED_SECONDS
        for number, node in enumerate(running.nodes):
            assert node.process.wait(ENDED_SECONDS) == 1
            line = last_line(node)
            assert "dllm: the engine died: " in line
            assert line.endswith("; the server ends with exit status 1")
            if number == victim:
                assert f"process EngineCore_DP{victim} (pid {pid}) was killed by signal 9" in line
            else:
                assert f"EngineCore_DP{number} (pid " in line or f"rank {victim} on another" in line
        assert time.monotonic() - died < ENDED_SECONDS + 3
