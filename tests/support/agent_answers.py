"""Answers of a server's four text endpoints, streamed or not, brought to one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.support.server import Server


class Answer(NamedTuple):
    """What a client has in the end.

    Attributes:
        thought, text: in the order of writing; several parts are added up.
        calls: the name and the arguments (JSON) of each call.
        end: the reason for which the answer ended, in the endpoint's word.
        tokens: how many were generated, for all answers of the request.
        logprobs: those of the answer's tokens, where they were asked for.
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
        return STREAMED[endpoint](_events(server, path, body))
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return WHOLE[endpoint](response.json())


def _events(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _calls(calls: Any) -> list[tuple[str, str]]:
    return [(name, json.dumps(json.loads(arguments))) for name, arguments in calls]


def _completion(answer: dict[str, Any]) -> list[Answer]:
    return _completion_events(iter([answer]))


def _completion_events(events: Iterator[dict[str, Any]]) -> list[Answer]:
    found = [*events]
    return [
        Answer(
            "",
            "".join(choice["text"] for choice in choices),
            [],
            choices[-1]["finish_reason"],
            found[-1]["usage"]["completion_tokens"],
            [p for choice in choices for p in (choice["logprobs"] or {}).get("token_logprobs", [])],
        )
        for choices in _by_index(found)
    ]


def _by_index(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The pieces of each of a request's ``n`` answers."""
    choices = [choice for event in events for choice in event["choices"]]
    return [
        [choice for choice in choices if choice["index"] == index]
        for index in sorted({choice["index"] for choice in choices})
    ]


def _chat(answer: dict[str, Any]) -> list[Answer]:
    for choice in answer["choices"]:
        choice["delta"] = message = choice.pop("message")
        calls = enumerate(message.get("tool_calls") or [])
        message["tool_calls"] = [call | {"index": index} for index, call in calls]
    return _chat_events(iter([answer]))


def _chat_events(events: Iterator[dict[str, Any]]) -> list[Answer]:
    found = [*events]
    answers = []
    for choices in _by_index(found):
        deltas = [choice["delta"] for choice in choices]
        calls: dict[int, list[str]] = {}
        for call in (call for delta in deltas for call in delta.get("tool_calls") or []):
            whole = calls.setdefault(call["index"], ["", ""])
            whole[0] += call["function"].get("name") or ""
            whole[1] += call["function"].get("arguments") or ""
        scores = [(choice.get("logprobs") or {}).get("content") or [] for choice in choices]
        answers.append(
            Answer(
                "".join(delta.get("reasoning") or "" for delta in deltas),
                "".join(delta.get("content") or "" for delta in deltas),
                _calls(calls.values()),
                next(filter(None, (choice["finish_reason"] for choice in reversed(choices)))),
                found[-1]["usage"]["completion_tokens"],
                [token["logprob"] for tokens in scores for token in tokens],
            )
        )
    return answers


def _responses(answer: dict[str, Any]) -> list[Answer]:
    found = {"reasoning": "", "message": ""}
    calls = []
    for item in answer["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            found[item["type"]] += "".join(part["text"] for part in item["content"])
    tokens = answer["usage"]["output_tokens"]
    texts = found["reasoning"], found["message"]
    return [Answer(*texts, _calls(calls), answer["status"], tokens, [])]


def _responses_events(events: Iterator[dict[str, Any]]) -> list[Answer]:
    found = [*events]
    items = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    return _responses(found[-1]["response"] | {"output": items})


def _message(answer: dict[str, Any]) -> list[Answer]:
    thought, text, calls = "", "", []
    for block in answer["content"]:
        thought += block.get("thinking") or ""
        text += block.get("text") or ""
        if block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
    tokens = answer["usage"]["output_tokens"]
    return [Answer(thought, text, _calls(calls), answer["stop_reason"], tokens, [])]


def _message_events(events: Iterator[dict[str, Any]]) -> list[Answer]:
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


WHOLE: dict[str, Callable[[dict[str, Any]], list[Answer]]] = {
    "completions": _completion,
    "chat": _chat,
    "responses": _responses,
    "messages": _message,
}
STREAMED: dict[str, Callable[[Iterator[dict[str, Any]]], list[Answer]]] = {
    "completions": _completion_events,
    "chat": _chat_events,
    "responses": _responses_events,
    "messages": _message_events,
}
