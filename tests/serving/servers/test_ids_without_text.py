"""A head has more rows than its tokenizer has tokens: what such an id does to each endpoint.

A bias makes tiny LLaDA2, whose head has 272 rows for 265 tokens, write nothing else.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.server import Server

pytestmark = pytest.mark.e2e

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WITHOUT_TEXT = {"268": 100.0, "270": 100.0}
QUESTION: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "12 + 5"}], "max_tokens": 12},
    COMPLETIONS: {"prompt": "12 + 5", "max_tokens": 12},
    RESPONSES: {"input": "12 + 5", "max_output_tokens": 12},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": (CHAT, {"tools": [TOOL]}),
    "logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "stop": (CHAT, {"stop": ["zz"], "ignore_eos": True}),
    "special": (CHAT, {"skip_special_tokens": False, "spaces_between_special_tokens": False}),
    "completions": (COMPLETIONS, {"logprobs": 2}),
    "echo": (COMPLETIONS, {"echo": True}),
    "responses": (RESPONSES, {}),
}


@pytest.mark.parametrize("name", MORE)
def test_it_has_no_text_and_breaks_no_answer(name: str, llada2: Server) -> None:
    path, more = MORE[name]
    body = QUESTION[path] | {"logit_bias": WITHOUT_TEXT} | more
    whole = llada2.post(path, **body)
    assert whole.status_code == 200, whole.text
    stream = llada2.post(path, **body, stream=True)
    assert stream.status_code == 200, stream.text
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if "data: " in line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not [event for event in events if event.get("error")]
    if path == RESPONSES:
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        return
    [choice] = whole.json()["choices"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    if path == CHAT:
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert (choice["message"]["content"] or "") == text
        assert name == "tools" or not text, "optional calls are constrained, so they have a text"
    else:
        assert choice["text"] == "".join(event["choices"][0]["text"] for event in events)


def test_a_constraint_never_writes_it(llada2: Server) -> None:
    body = QUESTION[CHAT] | {"logit_bias": WITHOUT_TEXT, "max_tokens": 40}
    answer = llada2.post(CHAT, **body, structured_outputs={"regex": "[a-z]{3,9}"})
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    assert content.isalpha() and 3 <= len(content) <= 9


def test_a_trace_has_its_id(llada2: Server) -> None:
    body = QUESTION[CHAT] | {"logit_bias": WITHOUT_TEXT, "return_token_ids": True}
    answer = llada2.post(CHAT, **body, vllm_xargs={"diffusion_trace": True}).json()
    [choice] = answer["choices"]
    assert {*choice["token_ids"]} <= {268, 270}
    tokens = [token for block in choice["diffusion_trace"]["blocks"] for token in block["tokens"]]
    assert {268, 270} & {*tokens}
    told = llada2.post("/detokenize", tokens=[268])
    assert told.json() == {"prompt": ""}, "the viewer then shows the id"
