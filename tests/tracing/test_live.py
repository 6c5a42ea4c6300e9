"""The ring of traces behind the live page: what it keeps, and in which pieces it tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dllm.tracing import live as live_traces
from vllm_dllm.tracing.live import MOST_ANSWERS, LiveTraces
from vllm_dllm.vllm_seams.channels import PassFlags
from vllm_dllm.vllm_seams.channels.records import Record

WIDTH = 4


def state(running: dict[str, Any], name: str) -> Any:
    """As vLLM's state of a running request, whose tokens `put` counts."""
    made = SimpleNamespace(request_id=name, prompt_len=0, tokens=0)
    made.detokenizer = SimpleNamespace(num_output_tokens=lambda: made.tokens)
    running[name] = made
    return made


def put(live: LiveTraces, request: Any, block: int, steps: int = 2) -> None:
    """The records of a block whose positions are all decided in its first step."""
    live.add(
        request,
        [
            Record(
                *(block * steps + step, 0, block * WIDTH, step, PassFlags(0)),
                tokens=np.arange(WIDTH) + 10,
                logprobs=np.zeros(WIDTH, np.float32),
                probabilities=np.full(WIDTH, 0.5, np.float32),
            )
            for step in range(steps)
        ],
    )
    request.tokens += WIDTH


def places(news: dict[str, Any]) -> list[tuple[int, int]]:
    return [(each["answer"], each["index"]) for each in news["blocks"]]


@pytest.fixture
def running() -> dict[str, Any]:
    return {}


@pytest.fixture
def live(running: dict[str, Any]) -> LiveTraces:
    return LiveTraces(running, lambda request: request.request_id)


def test_a_running_answer_grows(live: LiveTraces, running: dict[str, Any]) -> None:
    one, two = state(running, "one"), state(running, "two")
    put(live, one, 0)
    put(live, two, 0)
    first = live.news(0)
    assert [(each["name"], each["tokens"], each["running"]) for each in first["answers"]] == [
        ("one", 4, True),
        ("two", 4, True),
    ]
    assert places(first) == [(1, 0), (2, 0)]
    assert live.news(first["now"])["blocks"] == live.news(first["now"])["answers"] == []
    put(live, one, 1)
    second = live.news(first["now"])
    assert places(second) == [(1, 1)]
    assert [(each["name"], each["tokens"]) for each in second["answers"]] == [("one", 8)]
    del running["one"]
    third = live.news(second["now"])
    assert [(each["name"], each["running"]) for each in third["answers"]] == [("one", False)]
    assert len(live.news(0)["blocks"]) == 3, "whoever asks for the first time gets everything"


def test_a_block_that_begins_again(live: LiveTraces, running: dict[str, Any]) -> None:
    one = state(running, "one")
    put(live, one, 0)
    put(live, one, 1)
    before = live.news(0)
    put(live, one, 0, steps=3)
    after = live.news(before["now"])
    assert [(it["index"], len(it["block"]["passes"])) for it in after["blocks"]] == [(0, 3)]
    assert after["answers"][0]["blocks"] == 1, "what was behind it is gone"


def test_the_latest_answers_are_kept(live: LiveTraces, running: dict[str, Any]) -> None:
    requests = [state(running, f"{number}") for number in range(MOST_ANSWERS + 3)]
    for request in requests:
        put(live, request, 0)
    found = live.news(0)
    assert (len(found["kept"]), found["gone"]) == (MOST_ANSWERS, 3)
    assert [each["name"] for each in found["answers"]] == [each.request_id for each in requests[3:]]
    put(live, requests[0], 1)
    assert live.news(found["now"])["kept"] == found["kept"], "what is gone does not come back"
    assert live.news(found["now"])["blocks"] == []


def test_long_answers_leave_room_for_fewer(
    live: LiveTraces, running: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_traces, "MOST_POSITIONS", 5 * WIDTH * 2)
    for number in range(4):
        put(live, state(running, f"{number}"), 0)
    assert len(live.news(0)["kept"]) == 4
    put(live, running["3"], 1)
    put(live, running["3"], 2)
    assert [each["name"] for each in live.news(0)["answers"]] == ["1", "2", "3"]
    for block in range(3, 6):
        put(live, running["3"], block)
    assert live.news(0)["kept"] == [], "one answer alone may be too long"
    put(live, running["1"], 1)
    put(live, state(running, "4"), 0)
    assert [each["name"] for each in live.news(0)["answers"]] == ["4"]


def test_much_comes_in_pieces(
    live: LiveTraces, running: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_traces, "MOST_EVENTS", 3 * (WIDTH + 2))
    for number in range(4):
        for block in range(2):
            put(live, running.get(f"{number}") or state(running, f"{number}"), block)
    since, more, pieces = 0, True, 0
    found: list[tuple[int, int]] = []
    while more:
        piece = live.news(since)
        found += places(piece)
        since, more, pieces = piece["now"], piece["more"], pieces + 1
    assert found == [(number + 1, block) for number in range(4) for block in range(2)]
    assert pieces == 3
    assert live.news(since)["answers"] == []
