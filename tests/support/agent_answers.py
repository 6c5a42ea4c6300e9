"""Answers of a server's four text endpoints, streamed or not, brought to one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.support.server import Server


class Answer(NamedTuple):
    """What a client has in the end: parts are added up, and `end` is the endpoint's own word.

    Of each call there are the name and the arguments (JSON); `tokens` counts all `n` answers.
    """

    thought: str
    text: str
    calls: list[tuple[str, str]]
    end: str
    tokens: int
    logprobs: list[float]


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


def ask(server: Server, endpoint: str, prompt: str, stream: bool, **options: Any) -> list[Answer]:
    """Ask ``completions``, ``chat``, ``responses`` or ``messages``; return all ``n`` answers.

    Options are those of the Chat Completions API; `tool` and `forced` write what differs.
    """
    body = options | {"model": "m", "stream": stream}
    if stream and endpoint in ("completions", "chat"):
        body["stream_options"] = {"include_usage": True}
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
        return READ[endpoint]([*_events(server, path, body)])
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return READ[endpoint]([response.json()])


def _events(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _calls(calls: Any) -> list[tuple[str, str]]:
    return [(name, json.dumps(json.loads(arguments))) for name, arguments in calls]


def _by_index(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    choices = [choice for event in events for choice in event["choices"]]
    return [
        [choice for choice in choices if choice["index"] == index]
        for index in sorted({choice["index"] for choice in choices})
    ]


# Each reads the events of a stream, or a whole answer as the only one.


def _completions(events: list[dict[str, Any]]) -> list[Answer]:
    return [
        Answer(
            "",
            "".join(choice["text"] for choice in choices),
            [],
            choices[-1]["finish_reason"],
            events[-1]["usage"]["completion_tokens"],
            [p for choice in choices for p in (choice["logprobs"] or {}).get("token_logprobs", [])],
        )
        for choices in _by_index(events)
    ]


def _chat(events: list[dict[str, Any]]) -> list[Answer]:
    answers = []
    for choices in _by_index(events):
        deltas = [choice.get("delta", choice.get("message")) for choice in choices]
        calls: dict[int, list[str]] = {}
        for delta in deltas:
            for number, call in enumerate(delta.get("tool_calls") or []):
                place = number if "message" in choices[0] else call["index"]
                whole = calls.setdefault(place, ["", ""])
                whole[0] += call["function"].get("name") or ""
                whole[1] += call["function"].get("arguments") or ""
        scores = [(choice.get("logprobs") or {}).get("content") or [] for choice in choices]
        answers.append(
            Answer(
                "".join(delta.get("reasoning") or "" for delta in deltas),
                "".join(delta.get("content") or "" for delta in deltas),
                _calls(calls.values()),
                next(filter(None, (choice["finish_reason"] for choice in reversed(choices)))),
                events[-1]["usage"]["completion_tokens"],
                [token["logprob"] for tokens in scores for token in tokens],
            )
        )
    return answers


def _responses(events: list[dict[str, Any]]) -> list[Answer]:
    answer = events[-1].get("response", events[-1])
    done = [each["item"] for each in events if each.get("type") == "response.output_item.done"]
    found = {"reasoning": "", "message": ""}
    calls = []
    for item in done or answer["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            found[item["type"]] += "".join(part["text"] for part in item["content"])
    tokens = answer["usage"]["output_tokens"]
    return [Answer(*found.values(), _calls(calls), answer["status"], tokens, [])]


def _messages(events: list[dict[str, Any]]) -> list[Answer]:
    if "content" in events[0]:
        events = [*_streamed(events[0])]
    thought, text, end, tokens = "", "", "", 0
    calls: list[list[str]] = []
    for event in events:
        delta = event.get("delta") or {}
        thought, text = thought + delta.get("thinking", ""), text + delta.get("text", "")
        end = delta.get("stop_reason") or end
        tokens = (event.get("usage") or {}).get("output_tokens", tokens)
        if event.get("content_block", {}).get("type") == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
    return [Answer(thought, text, _calls(calls), end, tokens, [])]


def _streamed(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events that a whole message would be streamed in."""
    for block in message["content"]:
        if block["type"] == "tool_use":
            yield {"content_block": block, "delta": {"partial_json": json.dumps(block["input"])}}
        else:
            yield {"delta": {name: block.get(name) or "" for name in ("thinking", "text")}}
    yield {"delta": {"stop_reason": message["stop_reason"]}, "usage": message["usage"]}


READ: dict[str, Callable[[list[dict[str, Any]]], list[Answer]]] = {
    "completions": _completions,
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
}
