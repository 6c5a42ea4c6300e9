"""Thoughts and calls between tags in front of and inside of constraints, through a real server."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.support.checkpoints import TINY_SDAR
from tests.support.mistakes_in_requests import assert_mistakes_are_refused
from tests.support.server import Pool, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"),
    *("--reasoning-parser", "qwen3"),
)
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "seats": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "window": {"type": "boolean"},
    },
    "required": ["name", "seats", "window"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD}}
TOOL = {"type": "function", "function": {"name": "book", "parameters": RECORD}}
NAMED = {"type": "function", "function": {"name": "book"}}
ASKED = {"messages": [{"role": "user", "content": "sort 3 1 2"}], "max_tokens": 200}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
CALL, CALL_END, THINK, THINK_END = 259, 260, 261, 262  # ids of the tokenizer


@pytest.fixture
def sdar(pool: Pool) -> Server:
    return pool.get(TINY_SDAR, *FLAGS)


def chat(server: Server, **options: Any) -> dict[str, Any]:
    options = ASKED | {"return_token_ids": True} | options
    response = server.post("/v1/chat/completions", **options)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


@pytest.mark.parametrize("seed", range(4))
def test_a_format_begins_after_the_thought(sdar: Server, seed: int) -> None:
    options = {"response_format": FORMAT, "seed": seed, "temperature": float(seed > 0)}
    answer = chat(sdar, **options)
    assert answer["finish_reason"] == "stop" and answer["token_ids"].count(THINK_END) == 1
    jsonschema.validate(json.loads(answer["message"]["content"]), RECORD)
    answer = chat(sdar, **options, **NO_THOUGHT)
    jsonschema.validate(json.loads(answer["message"]["content"]), RECORD)
    assert not answer["message"].get("reasoning") and THINK_END not in answer["token_ids"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("seed", range(2))
def test_required_calls(sdar: Server, choice: Any, seed: int) -> None:
    for thought in ({}, NO_THOUGHT):
        answer = chat(sdar, tools=[TOOL], tool_choice=choice, seed=seed, **thought)
        calls = answer["message"]["tool_calls"]
        assert calls and answer["token_ids"].count(CALL) == len(calls)
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), RECORD)


def test_optional_calls_need_no_thought(sdar: Server) -> None:
    """An answer may be all thought, as without tools."""
    plain = chat(sdar, temperature=0)
    with_tools = chat(sdar, temperature=0, tools=[TOOL])
    assert with_tools["token_ids"] == plain["token_ids"]


def test_any_token_may_stand_in_free_text(sdar: Server) -> None:
    options = {"logit_bias": {str(THINK): 30.0}, "max_tokens": 20, "tools": [TOOL]}
    assert THINK in chat(sdar, **options)["token_ids"]


def test_the_responses_api_thinks_as_well(sdar: Server) -> None:
    form = {"format": {"type": "json_schema", "name": "r", "schema": RECORD}}
    response = sdar.post("/v1/responses", input="sort 3 1 2", text=form, max_output_tokens=200)
    assert response.status_code == 200, response.text
    texts = [
        part["text"]
        for item in response.json()["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    jsonschema.validate(json.loads("".join(texts)), RECORD)


def test_mistakes(sdar: Server) -> None:
    assert_mistakes_are_refused(sdar, "SDAR")
