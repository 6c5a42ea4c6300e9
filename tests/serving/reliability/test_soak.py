"""The soak in its short form, and proof that each of its rules can fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import Size, run
from tests.support.soak import client as soak_client
from tests.support.soak.client import (
    ABORTED,
    COMPLETED,
    FAILED,
    REFUSED,
    Answer,
    Client,
    Outcome,
    joined,
)
from tests.support.soak.faults import FROZEN, GARBAGE, HALF_SENT, SLOW_READERS
from tests.support.soak.models import MODELS
from tests.support.soak.requests import MASKED, UNIFORM, Ask, Sending, draw_plan, draw_pool
from tests.support.soak.rules import (
    MEGABYTE,
    Growth,
    Sample,
    different,
    growth,
    log_errors,
    resident_bytes,
    unexpected,
)
from vllm_dllm.decoding.names import algorithm_names

SIZES = {
    "llada2": Size(requests=350, distinct=80),
    "sdar": Size(requests=350, distinct=80),
    "gemma": Size(requests=250, distinct=50),
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_soak(name: str, tmp_path: Path) -> None:
    report = run(MODELS[name], SIZES[name], tmp_path / "log")
    print("\n".join(report.lines()))
    assert not report.wrong, "\n".join(report.wrong)
    # It was a soak: every kind of request was among them, and pages ran out.
    assert sum(report.counts.values()) == SIZES[name].requests
    assert min(report.counts[status] for status in (COMPLETED, ABORTED, REFUSED)) > 5
    assert report.preemptions > 0
    assert set(report.faults) == {HALF_SENT, GARBAGE, FROZEN, SLOW_READERS}
    assert min(report.faults.values()) > 0
    assert report.alone > 0.9 * SIZES[name].distinct


# ---- the mix


def test_every_algorithm_is_asked_for() -> None:
    """Who adds an algorithm adds it to the soak."""
    assert set(MASKED) == set(algorithm_names("mask", of_every_model=True))
    assert set(UNIFORM) == set(algorithm_names("uniform"))
    pool = draw_pool(150, "mask", seed=0)
    asked = {ask.body["vllm_xargs"].get("diffusion_algorithm") for ask in pool}
    assert asked == {None, *MASKED}


def test_the_front_end_is_asked_for() -> None:
    asked = [ask.body for ask in draw_pool(150, "mask", 0, frontend=True, adapters=("a", "b"))]
    assert {body.get("model") for body in asked} == {None, "a", "b"}
    for name in ("tools", "stop", "priority", "n"):
        assert sum(name in body for body in asked) >= 5, name


def test_the_mix_comes_from_its_seed() -> None:
    pool = draw_pool(150, "mask", seed=3)
    assert pool == draw_pool(150, "mask", seed=3) != draw_pool(150, "mask", seed=4)
    plan = draw_plan(2000, pool, seed=3)
    assert plan == draw_plan(2000, pool, seed=3)
    assert 0.08 < sum(one.leaves is not None for one in plan) / 2000 < 0.12
    assert 0.035 < sum(one.ask.wrong is not None for one in plan) / 2000 < 0.065
    assert 0.45 < sum(one.stream for one in plan) / 2000 < 0.55


# ---- every rule can fail

ASK = Ask("ask-7", "/v1/completions", {"prompt": "x"})
ANSWER = Answer((5, 6, 7), "abc", "length")


def test_with_tools_only_tokens_count() -> None:
    asked = replace(ASK, body={"tools": []})
    done = Outcome(Sending(31, asked, stream=True), COMPLETED, 1.0, replace(ANSWER, reason="stop"))
    assert different([done], {"ask-7": ANSWER}) == []
    other = replace(done, answer=replace(ANSWER, tokens=(5, 6)))
    assert len(different([done, other], {"ask-7": ANSWER})) == 1


def test_several_choices_are_told_apart() -> None:
    def event(index: int, token: int, text: str, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "token_ids": [token], "text": text, "finish_reason": reason}
        return {"choices": [choice]}

    events = [
        event(1, 8, "x"),
        event(0, 5, "a"),
        event(0, 6, "b", "stop"),
        event(1, 9, "", "length"),
    ]
    found = joined(events)
    assert (found.tokens, found.reason) == ((5, 6, 8, 9), "stop,length")
    assert found != joined([event(0, 5, "a"), event(0, 6, "bx", "stop"), *events[:1], events[-1]])


def outcome(answer: Answer | None = ANSWER, status: str = COMPLETED, detail: str = "") -> Outcome:
    return Outcome(Sending(31, ASK, stream=True), status, 1.0, answer, detail)


@pytest.mark.parametrize(
    "changed",
    [
        replace(ANSWER, tokens=(5, 9, 7)),
        replace(ANSWER, tokens=(5, 6)),
        replace(ANSWER, text="abd"),
        replace(ANSWER, reason="stop"),
    ],
)
def test_an_altered_answer_is_found(changed: Answer) -> None:
    alone = {"ask-7": ANSWER}
    assert different([outcome(), outcome(None, ABORTED)], alone) == []
    (complaint,) = different([outcome(), outcome(changed)], alone)
    assert "request 31 (ask-7, streamed)" in complaint


def test_an_answer_that_nobody_gave_alone_is_found() -> None:
    assert different([outcome()], {})


def test_a_request_that_broke_is_named() -> None:
    (complaint,) = unexpected([outcome(), outcome(None, FAILED, "hangs")])
    assert "request 31 (ask-7, streamed)" in complaint and complaint.endswith("hangs")


def grown(requests: int, bytes_at: Callable[[int], float]) -> Growth:
    steps = range(0, requests + 1, requests // 100)
    return growth([Sample(n, 2000 * MEGABYTE + int(bytes_at(n))) for n in steps])


def test_memory_that_settles_is_flat() -> None:
    """Grows to its size while the server becomes warm, and swings by a few MB."""
    for requests in (500, 20_000):
        found = grown(requests, lambda n: MEGABYTE * (min(n, 100) / 2 + 3 * (n % 3)))
        assert found.complaints() == []
        assert found.start == 2000 * MEGABYTE < found.warm


@pytest.mark.parametrize(("requests", "kilobytes"), [(500, 34), (3000, 7), (20_000, 3)])
def test_a_leak_is_found(requests: int, kilobytes: int) -> None:
    (complaint,) = grown(requests, lambda n: 1024 * kilobytes * n).complaints()
    assert f"{kilobytes}.0 KB each" in complaint


def test_a_run_too_short_for_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        grown(100, lambda n: 0)


def test_memory_of_a_group_is_that_of_its_processes() -> None:
    mine = resident_bytes(os.getpgid(0))
    assert mine > 10 * MEGABYTE
    assert resident_bytes(2**22 + 1) == 0  # beyond any process


REFUSAL = "(APIServer pid=7) ERROR 11-21 18:12:29 [exception.py:16] Exception caught. Request id: x"
STREAMED = """\
(APIServer pid=7) ERROR 11-21 18:12:29 [serving.py:500] Error in completion stream generator.
(APIServer pid=7) ERROR 11-21 18:12:29 [serving.py:500] Traceback (most recent call last):
(APIServer pid=7) ERROR 11-21 18:12:29 [serving.py:500] """
VALIDATION = "vllm.exceptions.VLLMValidationError: top_p must be in (0, 1]"
QUIET = 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'


def test_a_log_of_refusals_is_quiet() -> None:
    """A stream that is refused has both records."""
    log = "\n".join(
        [QUIET, REFUSAL, REFUSAL, REFUSAL, STREAMED + VALIDATION, STREAMED + VALIDATION]
    )
    assert log_errors(log, refused=3) == []
    assert log_errors(log, refused=2) == [
        "log: 3 requests were refused, of which 2 should have been"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=8) ERROR 11-21 18:12:29 [scheduler.py:1] dllm: request x is ended",
        "(Worker pid=9) ERROR 11-21 18:12:29 [exception.py:16] something else",
        STREAMED + "RuntimeError: the engine is dead",
        "ERROR:    Exception in ASGI application",
        "Traceback (most recent call last):",
    ],
)
def test_an_error_in_the_log_is_found(line: str) -> None:
    log = "\n".join([QUIET, REFUSAL, line, REFUSAL, QUIET])
    assert len(log_errors(log, refused=10)) == 1


def test_a_request_that_hangs_is_named() -> None:
    """A server that takes a request and never answers."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async def ask() -> Outcome:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, soak_client.session() as opened:
            client = Client(f"http://127.0.0.1:{port}", opened, answer_seconds=0.2)
            return await client.send(Sending(3, ASK, False))

    (complaint,) = unexpected([asyncio.run(ask())])
    assert "request 3 (ask-7, whole)" in complaint and "hangs" in complaint
