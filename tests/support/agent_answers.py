"""Answers of a server's four text endpoints, streamed or not, brought to one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx

from tests.support.server import Server


class Answer(NamedTuple):
    """What a client has in the end.

    Attributes:
        thought, text: in the order of writing; several parts are added up.
        calls: the name and the arguments (JSON) of each call.
        end: the reason for which the answer ended, in the endpoint's word.
    """

    thought: str
    text: str
    calls: list[tuple[str, str]]
    end: str


def tool(endpoint: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The description of a function as the endpoint expects it."""
    if endpoint == "messages":
        return {"name": name, "input_schema": schema}
    function = {"name": name, "parameters": schema}
    return {"type": "function"} | (function if endpoint == "responses" else {"function": function})


def forced(endpoint: str, name: str) -> Any:
    """The value of ``tool_choice`` that requires a call of this function."""
    if endpoint == "messages":
        return {"type": "tool", "name": name}
    named = {"name": name} if endpoint == "responses" else {"function": {"name": name}}
    return {"type": "function"} | named


def ask(server: Server, endpoint: str, prompt: str, stream: bool, **options: Any) -> Answer:
    """Ask ``completions``, ``chat``, ``responses`` or ``messages``.

    Options are those of the Chat Completions API; `tool` and `forced` write what differs.
    """
    body = options | {"model": "m", "stream": stream}
    if endpoint == "completions":
        body["prompt"] = prompt
    elif endpoint == "responses":
        body |= {"input": prompt, "max_output_tokens": body.pop("max_tokens")}
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
        if endpoint == "messages" and "stop" in body:
            body["stop_sequences"] = body.pop("stop")
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}.get(
        endpoint, f"/v1/{endpoint}"
    )
    if stream:
        return STREAMED[endpoint](_events(server, path, body))
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return WHOLE[endpoint](response.json())


def _events(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _calls(calls: Any) -> list[tuple[str, str]]:
    return [(name, json.dumps(json.loads(arguments))) for name, arguments in calls]


def _completion(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    return Answer("", choice["text"], [], choice["finish_reason"])


def _completion_events(events: Iterator[dict[str, Any]]) -> Answer:
    choices = [choice for event in events for choice in event["choices"]]
    return Answer("", "".join(c["text"] for c in choices), [], choices[-1]["finish_reason"])


def _chat(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = (call["function"] for call in message.get("tool_calls") or [])
    return Answer(
        message.get("reasoning") or "",
        message.get("content") or "",
        _calls((call["name"], call["arguments"]) for call in calls),
        choice["finish_reason"],
    )


def _chat_events(events: Iterator[dict[str, Any]]) -> Answer:
    thought, text, end = "", "", ""
    calls: dict[int, list[str]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        delta, end = choice["delta"], choice["finish_reason"] or end
        thought += delta.get("reasoning") or ""
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            whole = calls.setdefault(call["index"], ["", ""])
            whole[0] += call["function"].get("name") or ""
            whole[1] += call["function"].get("arguments") or ""
    return Answer(thought, text, _calls(calls.values()), end)


def _responses(answer: dict[str, Any]) -> Answer:
    found = {"reasoning": "", "message": ""}
    calls = []
    for item in answer["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            found[item["type"]] += "".join(part["text"] for part in item["content"])
    return Answer(found["reasoning"], found["message"], _calls(calls), answer["status"])


def _responses_events(events: Iterator[dict[str, Any]]) -> Answer:
    items = []
    for event in events:
        if event["type"] == "response.output_item.done":
            items.append(event["item"])
    # The last event repeats the answer; its output must be what the events before gave.
    return _responses({"output": items, "status": event["response"]["status"]})


def _message(answer: dict[str, Any]) -> Answer:
    thought, text, calls = "", "", []
    for block in answer["content"]:
        thought += block.get("thinking") or ""
        text += block.get("text") or ""
        if block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
    return Answer(thought, text, _calls(calls), answer["stop_reason"])


def _message_events(events: Iterator[dict[str, Any]]) -> Answer:
    thought, text, end = "", "", ""
    calls: list[list[str]] = []
    for event in events:
        delta = event.get("delta") or {}
        thought, text = thought + delta.get("thinking", ""), text + delta.get("text", "")
        end = delta.get("stop_reason") or end
        if event.get("content_block", {}).get("type") == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
    return Answer(thought, text, _calls(calls), end)


WHOLE: dict[str, Callable[[dict[str, Any]], Answer]] = {
    "completions": _completion,
    "chat": _chat,
    "responses": _responses,
    "messages": _message,
}
STREAMED: dict[str, Callable[[Iterator[dict[str, Any]]], Answer]] = {
    "completions": _completion_events,
    "chat": _chat_events,
    "responses": _responses_events,
    "messages": _message_events,
}
