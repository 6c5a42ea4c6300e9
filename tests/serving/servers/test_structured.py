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

import httpx
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


@pytest.fixture(scope="module")
def server(tool_server: Server) -> Server:
    return tool_server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    asked = {"model": "m", "messages": ASK, "max_tokens": 60, "temperature": 0} | options
    return client.chat.completions.create(**asked)


def test_response_format(client: openai.OpenAI) -> None:
    choice = chat(client, response_format=FORMAT, temperature=0.8, seed=3).choices[0]
    jsonschema.validate(json.loads(choice.message.content), RECORD)
    assert choice.finish_reason == "stop"


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


def test_completions(server: Server) -> None:
    body = {
        "prompt": "copy ab",
        "max_tokens": 20,
        "structured_outputs": {"regex": "[0-9]{3}-[a-f]"},
    }
    text = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    assert re.fullmatch("[0-9]{3}-[a-f]", text)
    body["structured_outputs"] = {"choice": ["yes", "no"]}
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] in ("yes", "no")


def test_responses(client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_schema", "name": "r", "schema": RECORD}}
    answer = client.responses.create(model="m", input="Who?", text=text, max_output_tokens=60)
    jsonschema.validate(json.loads(answer.output_text), RECORD)


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
def test_hostile_constraints(server: Server, case: str, stream: bool) -> None:
    """Refused with the reason, not for being busy, and others are answered all the while."""
    constraint, reason = HOSTILE[case]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.complete, "copy ab", 8)
        begin = time.perf_counter()
        body = {"prompt": "a", "max_tokens": 30, "stream": stream, "structured_outputs": constraint}
        response = server.post("/v1/completions", **body)
        seconds = time.perf_counter() - begin
        assert response.status_code == 400, response.text[:500]
        assert "structured" in response.text
        assert reason in response.text, response.text[:500]
        assert len(response.text) < 2000
        assert other.result()["token_ids"]
    assert seconds < 60, "a hostile one may use 512 MiB before it is refused"


def test_refusals_leave_nothing_in_the_log(server: Server) -> None:
    """After those above. Futures whose error nobody heard of would stand there, by a traceback."""
    assert "never retrieved" not in server.log.read_text()


def slow(n: int) -> dict[str, str]:
    return {"regex": f"(a|b)*a(a|b){{26}}c{{{n + 1}}}"}


def flood(server: Server, n: int) -> httpx.Response:
    """One of many requests, by all ways in turn, whose constraint takes too long."""
    wanted = {"max_tokens": 30, "structured_outputs": slow(n)}
    schema = {"type": "string", "pattern": f"^{slow(n)['regex']}$"}
    text = {"format": {"type": "json_schema", "name": "r", "schema": schema}}
    path, ask = [
        ("completions", {"prompt": "a"} | wanted),
        ("chat/completions", {"messages": ASK} | wanted),
        ("responses", {"input": "Who?", "text": text}),
    ][n % 3]
    body = {"model": "m", "stream": n % 2 == 1} | ask
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def test_slow_constraints_hold_up_nothing_that_is_compiled(server: Server) -> None:
    """What is new waits, and who must wait for too long hears of it."""

    def timed(seconds: float, **constraint: Any) -> None:
        begin = time.perf_counter()
        body = {"prompt": "a", "max_tokens": 30} | constraint
        response = server.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        assert time.perf_counter() - begin < seconds

    known = {"structured_outputs": {"regex": "known [0-9]"}}
    timed(60, **known)
    with ThreadPoolExecutor(40) as pool:
        sent = [pool.submit(flood, server, n) for n in range(40)]
        time.sleep(0.5)
        timed(4)
        timed(4, **known)
        answers = [one.result() for one in sent]
    codes = [answer.status_code for answer in answers]
    assert set(codes) <= {400, 503}
    # All are from one address, and each is compiled on its own by one of two processes.
    assert codes.count(400) <= 20
    for answer in answers:
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        if answer.status_code == 400:
            assert "more than 512 MiB" in error["message"]
        else:
            assert error["type"] == "Service Unavailable"
            assert re.search(": .* busy, try again", error["message"])
    assert flood(server, 0).status_code == 400, "it takes its time while nobody waits"
    begin = time.perf_counter()
    assert flood(server, 0).status_code == 400
    assert time.perf_counter() - begin < 1, "what is too slow is known to be"
    server.wait_until_idle()


def test_a_killed_process_is_not_a_slow_constraint(server: Server) -> None:
    """Requests are tried again where it was killed; and it is there again for the next one."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(flood, server, 100)
        killed: set[int] = set()
        while not sent.done():
            for worker in workers(server) - killed:
                killed.add(worker)
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.01)
        answer = sent.result()
    assert len(killed) == 2
    assert answer.status_code == 503, answer.text
    assert "killed" in answer.json()["error"]["message"]
    body = {"prompt": "a", "max_tokens": 30, "structured_outputs": {"regex": "next [0-9]"}}
    assert server.post("/v1/completions", **body).status_code == 200


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


def test_beam_search_is_refused(server: Server) -> None:
    """VLLM would pass the constraint over."""
    body = {"prompt": "a", "max_tokens": 8, "use_beam_search": True, "n": 2}
    body["structured_outputs"] = {"choice": ["ab"]}
    response = server.post("/v1/completions", **body)
    assert response.status_code == 400
    assert "use_beam_search" in response.text


def test_a_budget_that_is_too_small_says_what_it_needs(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json": RECORD}}
    for stream in (False, True):
        response = server.post("/v1/completions", stream=stream, **body)
        assert response.status_code == 400
        assert re.search(r"needs at least \d+ tokens", response.text), response.text
    server.wait_until_idle()
