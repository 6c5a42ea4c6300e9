"""The options of a constraint through a real server, and what its log says of one."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ASK = [{"role": "user", "content": "Who?"}]


ENDLESS = {"type": "array", "items": {"enum": [0, 1]}}


def test_a_request_without_a_maximum_ends(llada2: Server) -> None:
    """A list of any length need not end by itself. What is left out here counts for no chat."""
    body: dict[str, Any] = {
        "messages": ASK,
        "structured_outputs": {"json": ENDLESS},
        "temperature": 1.5,
        "seed": 5,
    }
    for options, most in (
        ({}, 30),
        ({"vllm_xargs": {"diffusion_constraint_tokens": 20}}, 20),
        ({"vllm_xargs": {"diffusion_constraint_tokens": 1}}, 3),
        ({"max_tokens": 200}, 200),
    ):
        response = llada2.post("/v1/chat/completions", **body, **options)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["usage"]["completion_tokens"] <= most
        assert answer["choices"][0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), ENDLESS)


def test_options_of_a_constraint(llada2: Server) -> None:
    """A text of 17 brackets needs as many calls of rules inside each other."""
    nested: dict[str, Any] = {"type": "array", "items": {"$ref": "#"}}
    for _ in range(17):
        nested: dict[str, Any] = {"type": "array", "items": nested, "minItems": 1, "maxItems": 1}
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 60, "structured_outputs": {"json": nested}}
    assert llada2.post("/v1/completions", **body).status_code == 200
    shallow = llada2.post("/v1/completions", **body, vllm_xargs={"diffusion_constraint_depth": 16})
    assert shallow.status_code == 400 and "16 calls" in shallow.text, shallow.text
    body["structured_outputs"] = {"regex": "a"}
    for wrong, why in (
        ({"max_tokens": 9, "vllm_xargs": {"diffusion_constraint_tokens": 9}}, "without max_tokens"),
        ({"vllm_xargs": {"diffusion_constraint_depth": 15}}, "at least 16 and at most 1024"),
        ({"structured_outputs": None, "vllm_xargs": {"diffusion_constraint_depth": 20}},
         "diffusion_constraint_depth is for requests with a constraint"),
        ({"structured_outputs": None, "max_tokens": None,
          "vllm_xargs": {"diffusion_constraint_tokens": 20}},
         "diffusion_constraint_tokens is for requests with a constraint"),
    ):  # fmt: skip
        refused = llada2.post("/v1/completions", **(body | wrong))
        assert refused.status_code == 400 and why in refused.text, refused.text


def test_ignored_keywords_are_in_the_log_once(llada2: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null", "x-new\nline": 1}}}
    for _ in range(2):
        llada2.complete("a", 30, structured_outputs={"json": schema})
    said = [line for line in llada2.log.read_text().splitlines() if "have no effect" in line]
    assert len(said) == 1 and r"$.a: x-new\nline" in said[0], said


PARAMETERS = {"type": "object", "properties": {"row": {"type": "integer"}}}
FREE = {"name": "book", "parameters": PARAMETERS}
OPTIONAL = {"tools": [{"type": "function", "function": FREE}], "tool_choice": "auto"}
STRICT = {"tools": [{"type": "function", "function": FREE | {"strict": True}}]}
TOOL = {"type": "function", "name": "book", "parameters": PARAMETERS}
CONFLICTS: list[dict[str, Any]] = [
    {"min_tokens": 8},
    {"ignore_eos": True},
    {"stop_token_ids": [120]},
]


def chat(llada2: Server, **body: Any) -> dict[str, Any]:
    body = {"messages": ASK, "max_tokens": 60, "temperature": 1.5, "seed": 3} | body
    response = llada2.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("tools", [OPTIONAL, STRICT], ids=["optional", "strict"])
def test_a_text_ends_an_output_with_optional_tools(llada2: Server, tools: Any) -> None:
    asked = [{"role": "user", "content": "reverse 52 97 23 71 40"}]
    body = {"messages": asked, "temperature": 0} | tools
    assert chat(llada2, **body)["choices"][0]["message"]["content"] == "40 71 23 97 52"
    (choice,) = chat(llada2, **body, stop=["sort", "23"])["choices"]
    assert choice["message"]["content"] == "40 71 "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "23")


def test_what_conflicts_with_optional_tools_has_its_effect(llada2: Server) -> None:
    assert chat(llada2, **OPTIONAL, min_tokens=40)["usage"]["completion_tokens"] >= 40
    assert chat(llada2, **OPTIONAL, ignore_eos=True)["usage"]["completion_tokens"] == 60
    for conflict in CONFLICTS:
        chat(llada2, **OPTIONAL, **conflict, stop=["Observation:"])
    answer = llada2.post("/v1/responses", input="Who?", tools=[TOOL], ignore_eos=True, stop=["x"])
    assert answer.status_code == 200, answer.text
    said = [ln for ln in llada2.log.read_text().splitlines() if "optional tools and" in ln]
    assert len(said) == 3, said
    assert all(any(name in line for line in said) for (name,) in CONFLICTS)


@pytest.mark.parametrize("conflict", CONFLICTS, ids=str)
def test_what_conflicts_with_a_constraint_that_was_asked_for(
    llada2: Server, conflict: dict[str, Any]
) -> None:
    (name,) = conflict
    form = {"response_format": {"type": "json_object"}}
    asked: list[dict[str, Any]] = [form, OPTIONAL | form, OPTIONAL | {"tool_choice": "required"}]
    asked += [STRICT, OPTIONAL | {"vllm_xargs": {"diffusion_constraint_depth": 32}}]
    for body in asked:
        refused = llada2.post("/v1/chat/completions", messages=ASK, **body, **conflict)
        assert refused.status_code == 400, body
        assert f"{name}" in refused.json()["error"]["message"]


def test_a_text_ends_an_output_with_a_format(llada2: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["abxc"]}}}
    (choice,) = chat(llada2, response_format=form, stop=["x"])["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ('"ab', "x")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "book"}}], ids=str
)
def test_a_constraint_beside_a_required_tool_is_refused(llada2: Server, choice: Any) -> None:
    """vLLM puts the tool's schema in its place, and an invalid grammar had status 200."""
    body = {"messages": ASK, "structured_outputs": {"grammar": "root ::= x"}}
    refused = llada2.post("/v1/chat/completions", **body, **(OPTIONAL | {"tool_choice": choice}))
    assert refused.status_code == 400
    assert "two constraints on one answer" in refused.json()["error"]["message"]
