"""Structured output through a real server: formats, tools, streams, hostile constraints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from examples.extract_records import extract
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD, "strict": True}}
TOOL = {
    "type": "function",
    "function": {"name": "book", "description": "Book a seat.", "parameters": RECORD},
}
ASK = [{"role": "user", "content": "Who?"}]


@pytest.fixture
def client(llada2: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{llada2.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    asked = {"model": "m", "messages": ASK, "max_tokens": 60, "temperature": 0} | options
    return client.chat.completions.create(**asked)


def test_a_stream_is_valid_too(client: openai.OpenAI) -> None:
    parts = chat(client, response_format=FORMAT, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    jsonschema.validate(json.loads(text), RECORD)


def test_several_samples(client: openai.OpenAI) -> None:
    found = chat(client, response_format=FORMAT, temperature=1.0, n=3, seed=1).choices
    assert len(found) == 3
    for choice in found:
        jsonschema.validate(json.loads(choice.message.content), RECORD)


STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "book"}}, "required"], ids=str
)
def test_strict_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    answer = chat(client, tools=[STRICT], tool_choice=choice, max_tokens=120).choices[0]
    (call, *_) = answer.message.tool_calls
    assert call.function.name == "book"
    jsonschema.validate(json.loads(call.function.arguments), RECORD)


def test_the_example(client: openai.OpenAI) -> None:
    person = extract(client, "Ada, 36, lives in London.")
    assert 0 <= person.age <= 130


def test_completions(llada2: Server) -> None:
    body = {
        "prompt": "copy ab",
        "max_tokens": 20,
        "structured_outputs": {"regex": "[0-9]{3}-[a-f]"},
    }
    text = llada2.post("/v1/completions", **body).json()["choices"][0]["text"]
    assert re.fullmatch("[0-9]{3}-[a-f]", text)
    body["structured_outputs"] = {"choice": ["yes", "no"]}
    assert llada2.post("/v1/completions", **body).json()["choices"][0]["text"] in ("yes", "no")


DEEP: dict[str, Any] = {"type": "null"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP, "minItems": 1}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "invalid": ({"regex": "(a"}, "not a regular expression"),
    "catastrophic": ({"regex": "((a{1,300}){1,300}){1,300}"}, "too large"),
    "states": ({"regex": "(.*a.{18}){3}"}, ""),
    "unsupported": ({"regex": "(?=a)b"}, ""),
    "keyword": (
        {"json": {"items": {"type": "string"}, "uniqueItems": True, "minItems": 7}},
        "uniqueItems",
    ),
    "empty": ({"choice": []}, "choice"),
    "huge": ({"json": {"enum": ["x" * 10_000_000]}}, "long"),
    "deep": ({"json": DEEP}, "diffusion_constraint_depth"),
    "token": ({"structural_tag": '{"format": {"type": "token", "token": 3}}'}, ""),
    "lookahead": ({"grammar": 'root ::= "a" (= "b")'}, "lookahead"),
    "endless": ({"grammar": 'start: "a" start'}, "no text at all"),
    "files": ({"grammar": "%import .secret.A\nstart: A"}, "import of secret"),
    "recursive": ({"json": {"$ref": "#"}}, ""),
}


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_constraints(llada2: Server, case: str, stream: bool) -> None:
    """Refused with the reason, not for being busy, and others are answered all the while."""
    constraint, reason = HOSTILE[case]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(llada2.complete, "copy ab", 8)
        begin = time.perf_counter()
        body = {"prompt": "a", "max_tokens": 30, "stream": stream, "structured_outputs": constraint}
        response = llada2.post("/v1/completions", **body)
        seconds = time.perf_counter() - begin
        assert response.status_code == 400, response.text[:500]
        assert "structured" in response.text
        assert reason in response.text, response.text[:500]
        assert len(response.text) < 2000
        assert other.result()["token_ids"]
    assert seconds < 60, "a hostile one may use 512 MiB before it is refused"


def test_refusals_leave_nothing_in_the_log(llada2: Server) -> None:
    """After those above. Futures whose error nobody heard of would stand there, by a traceback."""
    assert "never retrieved" not in llada2.log.read_text()


SLOW = {"prompt": "a", "max_tokens": 30, "structured_outputs": {"regex": "(a|b)*a(a|b){26}c"}}


def test_a_killed_process_is_not_a_slow_constraint(llada2: Server) -> None:
    """Requests are tried again where it was killed; and it is there again for the next one."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(llada2.post, "/v1/completions", **SLOW)
        killed: set[int] = set()
        while not sent.done():
            for worker in workers(llada2) - killed:
                killed.add(worker)
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.01)
        answer = sent.result()
    assert len(killed) == 2
    assert answer.status_code == 503, answer.text
    assert "killed" in answer.json()["error"]["message"]
    body = {"prompt": "a", "max_tokens": 30, "structured_outputs": {"regex": "next [0-9]"}}
    assert llada2.post("/v1/completions", **body).status_code == 200


def workers(server: Server) -> set[int]:
    """The processes in which constraints are being compiled."""
    return {worker for child in children(server.process.pid) for worker in children(child)
            if b"canvas_grammar.pool_process" in command(child)}  # fmt: skip


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def command(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_budget_that_is_too_small_says_what_it_needs(llada2: Server) -> None:
    body = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json": RECORD}}
    for stream in (False, True):
        response = llada2.post("/v1/completions", stream=stream, **body)
        assert response.status_code == 400
        assert re.search(r"needs at least \d+ tokens", response.text), response.text
    llada2.wait_until_idle()
