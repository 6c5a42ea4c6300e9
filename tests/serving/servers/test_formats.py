"""Formats, calls and thoughts of each family over HTTP: valid, finished, parsed or refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.support.mistakes_in_requests import assert_mistakes_are_refused
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "seats": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3},
        "window": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "who": {"type": "object", "properties": {"age": {"type": "number"}}, "required": ["age"]},
    },
    "required": ["name", "seats", "window", "who"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": BOOK}}
NAMED = {"type": "function", "function": {"name": "book"}}
FLAT = {"type": "function", "name": "book"}
ASKED = {"messages": [{"role": "user", "content": "sort 61 35 88 14"}], "max_tokens": 256}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
THINK, THINK_END = 261, 262  # ids of SDAR's tokenizer
DIFFERENT = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 7}
REFERENCE = {"a": {"$ref": "#/$defs/n"}}
# Parameters that no call is written with, and what is said of them.
UNWRITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "llada2": ({"properties": {"a": DIFFERENT}}, "uniqueItems"),
    "sdar": ({"properties": {"a": DIFFERENT}}, "uniqueItems"),
    # VLLM's parser does not follow references, so it would read a text in place of a number.
    "gemma": ({"properties": REFERENCE, "$defs": {"n": {"type": "integer"}}}, "Gemma's notation"),
}
NAMES = {"llada2": "LLaDA2", "sdar": "SDAR", "gemma": "DiffusionGemma"}


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def served(family: str, request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(family)


def chat(server: Server, **options: Any) -> list[dict[str, Any]]:
    response = server.post(CHAT, **(ASKED | {"return_token_ids": True} | options))
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def tool(strict: bool, parameters: dict[str, Any] = BOOK) -> dict[str, Any]:
    function = {"name": "book", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def assert_valid(text: str) -> None:
    jsonschema.validate(json.loads(text), BOOK)


def calls_of(choice: dict[str, Any]) -> list[Any]:
    """The calls of an answer, all of them valid and finished."""
    calls = choice["message"].get("tool_calls") or []
    for call in calls:
        assert call["function"]["name"] == "book"
        assert_valid(call["function"]["arguments"])
    assert "tool_call" not in (choice["message"]["content"] or "")
    return calls


@pytest.mark.parametrize("thought", [{}, NO_THOUGHT], ids=["thought", "no thought"])
def test_a_format(family: str, served: Server, thought: dict[str, Any]) -> None:
    """It begins after the thought; of each sample, and of a stream."""
    for asked in ({"temperature": 0}, {"temperature": 1, "seed": 1, "n": 3}):
        for choice in chat(served, response_format=FORMAT, **asked, **thought):
            assert choice["finish_reason"] == "stop"
            assert_valid(choice["message"]["content"])
            if family == "sdar":
                assert choice["token_ids"].count(THINK_END) == (not thought)
    stream = served.post(CHAT, **ASKED, response_format=FORMAT, **thought, stream=True).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert_valid("".join(one["choices"][0]["delta"].get("content") or "" for one in events))


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_required_calls(served: Server, choice: Any) -> None:
    for seed, thought in enumerate(({}, NO_THOUGHT, {})):
        asked = {"tools": [tool(strict=seed > 1)], "tool_choice": choice, "seed": seed}
        (found,) = chat(served, **asked, temperature=1.5 * (seed > 0), **thought)
        calls = calls_of(found)
        assert calls and (len(calls) == 1 or choice != NAMED)


@pytest.mark.parametrize("strict", [True, False])
def test_optional_calls(served: Server, strict: bool) -> None:
    """Free text as without tools, and calls in it that are valid once they are begun."""
    (plain,) = chat(served, temperature=0)
    (free,) = chat(served, temperature=0, tools=[tool(strict)])
    assert free["token_ids"] == plain["token_ids"]
    for seed in range(4):
        calls_of(chat(served, tools=[tool(strict)], temperature=1.5, seed=seed)[0])


def test_responses(served: Server) -> None:
    form = {"format": {"type": "json_schema", "name": "r", "schema": BOOK}}
    tools = [FLAT | {"parameters": BOOK, "strict": strict} for strict in (True, False)]
    for more in (
        {"text": form},
        {"tools": tools[:1], "tool_choice": "required"},
        {"tools": tools[1:], "tool_choice": FLAT},
    ):
        answer = served.post(RESPONSES, input="sort 3 1 2", max_output_tokens=256, **more)
        assert answer.status_code == 200, answer.text
        said = [
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            for item in answer.json()["output"]
            if item["type"] == ("message" if "text" in more else "function_call")
        ]
        assert said
        for text in said:
            assert_valid(text)


def test_parameters_that_cannot_be_written(family: str, served: Server) -> None:
    more, complaint = UNWRITABLE[family]
    parameters = {"type": "object", "required": ["a"]} | more
    (answer,) = chat(served, tools=[tool(False, parameters)], tool_choice="required")
    (call, *_) = answer["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    asked = ASKED | {"tools": [tool(True, parameters)], "tool_choice": "required"}
    refused = served.post(CHAT, **asked)
    assert refused.status_code == 400 and complaint in refused.text, refused.text


@pytest.mark.parametrize("family", ["sdar"], indirect=True)
def test_any_token_may_stand_in_free_text(served: Server) -> None:
    options = {"logit_bias": {str(THINK): 30.0}, "max_tokens": 20, "tools": [tool(False)]}
    assert THINK in chat(served, **options)[0]["token_ids"]


def test_mistakes(family: str, served: Server) -> None:
    assert_mistakes_are_refused(served, NAMES[family])


# ---- DiffusionGemma alone

GEMMA = pytest.mark.parametrize("family", ["gemma"], indirect=True)


@GEMMA
def test_logprobs(served: Server) -> None:
    (choice,) = chat(served, logprobs=True, top_logprobs=3, temperature=0, seed=42)
    assert choice["message"]["content"] == "14 35 61 88"
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith("14 35 61 88")
    for entry in content:
        logprobs = [other["logprob"] for other in entry["top_logprobs"]]
        assert entry["logprob"] <= 0 and logprobs[0] == max(logprobs)
    served.wait_until_idle()
