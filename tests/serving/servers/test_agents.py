"""Reasoning and tool calls of a real server: streamed, they are what they are unstreamed.

The model copies letters. In its copy here some letters are named as the marks of thoughts and
calls, so that it writes what it is asked for, marks included, without any constraint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import TINY
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# `<|im_end|>` makes the parser look at the last turn only: the user's text has marks, too.
MARKS = {"q": "<think>", "x": "</think>", "z": "<tool_call>", "v": "</tool_call>"}
MARKS |= {
    "w": '{"name": "',
    "k": '", "arguments": {"days": ',
    "j": "}}",
    "<|role_end|>": "<|im_end|>",
}
FLAGS = ("--reasoning-parser", "nemotron_v3", "--enable-auto-tool-choice")
FLAGS += ("--tool-call-parser", "hermes")
STOP = ["never written!"]  # so that text comes later than its tokens
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}}
# What the model writes, and what a client must have: the thought, the text and the calls. This
# parser drops text after a call.
Answer = tuple[str, str, list[tuple[str, int]]]
TEXTS: dict[str, Answer] = {
    "q3phx75zwbk46jv": ("3ph", "75", [("b", 46)]),
    "qu4xzwfk33jvszwbk6jv": ("u4", "", [("f", 33), ("b", 6)]),
    "qab12xy5zwfk7jvzwbk81jvdd": ("ab12", "y5", [("f", 7), ("b", 81)]),
    "qdehxsum": ("deh", "sum", []),
    "qnest": ("nest", "", []),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scratch = tmp_path_factory.mktemp("agents")
    checkpoint = shutil.copytree(TINY / "tiny-llada2", scratch / "checkpoint")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    for name, mark in MARKS.items():
        vocabulary[mark] = number = vocabulary.pop(name)
        added[:] = [one for one in added if one["id"] != number]
        added.append(dict(added[0], id=number, content=mark, special=mark == "<|im_end|>"))
    added.sort(key=lambda one: one["id"])
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = checkpoint / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|role_end|>", "<|im_end|>"))
    with Server(checkpoint, *FLAGS, log=scratch / "log") as running:
        yield running


def events(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def chat(server: Server, body: dict[str, Any]) -> Answer:
    tools = [{"type": "function", "function": {"name": n, "parameters": DAYS}} for n in "fb"]
    body |= {"messages": [{"role": "user", "content": body.pop("asked")}], "tools": tools}
    body["stop"] = STOP
    thought, text, calls = "", "", {}
    for event in events(server, "/v1/chat/completions", body):
        delta = event["choices"][0]["delta"]
        thought += delta.get("reasoning") or ""
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            whole = calls.setdefault(call["index"], ["", ""])
            whole[0] += call["function"].get("name") or ""
            whole[1] += call["function"].get("arguments") or ""
    return thought, text, [(name, json.loads(v)["days"]) for name, v in calls.values()]


def responses(server: Server, body: dict[str, Any]) -> Answer:
    body |= {"input": body.pop("asked"), "max_output_tokens": body.pop("max_tokens")}
    body["tools"] = [{"type": "function", "name": name, "parameters": DAYS} for name in "fb"]
    found = {"reasoning": "", "message": ""}
    calls = []
    for event in events(server, "/v1/responses", body):
        if event["type"] == "response.output_item.done":
            item = event["item"]
            if item["type"] == "function_call":
                calls.append((item["name"], json.loads(item["arguments"])["days"]))
            else:
                found[item["type"]] += "".join(part["text"] for part in item["content"])
    return found["reasoning"], found["message"], calls


def claude(server: Server, body: dict[str, Any]) -> Answer:
    body |= {"messages": [{"role": "user", "content": body.pop("asked")}]}
    body["tools"] = [{"name": name, "input_schema": DAYS} for name in "fb"]
    body["stop_sequences"] = STOP
    thought, text, calls = "", "", []
    for event in events(server, "/v1/messages", body):
        delta = event.get("delta") or {}
        thought, text = thought + delta.get("thinking", ""), text + delta.get("text", "")
        if event.get("content_block", {}).get("type") == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
    return thought, text, [(name, json.loads(v)["days"]) for name, v in calls]


@pytest.mark.parametrize("prefix", [False, True], ids=["blocks", "prefixes"])
@pytest.mark.parametrize("endpoint", [chat, responses, claude])
@pytest.mark.parametrize("text", TEXTS)
def test_streams(server: Server, text: str, endpoint: Any, prefix: bool) -> None:
    asked = "copy " + "".join(MARKS.get(letter, letter) for letter in text)
    body = {"model": "m", "asked": asked, "max_tokens": 64, "temperature": 0, "stream": True}
    body["vllm_xargs"] = {"diffusion_stream_prefix": prefix}
    thought, written, calls = endpoint(server, body)
    assert (thought, "".join(written.split()), calls) == TEXTS[text]
