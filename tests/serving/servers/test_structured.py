"""Structured output through a real server: options, conflicts, hostile constraints, clients."""

from __future__ import annotations

import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import jsonschema
import psutil
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.serving.servers.conftest import KEYS
from tests.support.clients.servers import COMPLAINT, blocks, check, misspell, run_here
from tests.support.server import Server
from vllm_dllm.frontend.http_server import client_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ASK: list[Any] = [{"role": "user", "content": "Who?"}]


class Person(BaseModel):
    """Who it is."""

    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=130)]


# ---- clients


@pytest.mark.parametrize("name", ["OpenAI", "Anthropic", "LangChain", "Pydantic AI"])
def test_the_page_of_clients(llada2: Server, name: str) -> None:
    """The code of docs/clients.md, which hands on options, too: a misspelt one is refused."""
    block = blocks()[name]
    check(run_here(block, llada2.url, "m"))
    with pytest.raises(Exception, match=COMPLAINT):
        run_here(misspell(block), llada2.url, "m")


def test_agents_stop_in_front_of_observations(llada2: Server) -> None:
    """Agents of the kind ReAct send a text that ends an output, and may have tools as well."""
    model = ChatOpenAI(
        base_url=f"{llada2.url}/v1", api_key="none", model="m", max_tokens=250, seed=1
    )
    bound = model.bind_tools([Person]).bind(stop=["\nObservation:"], temperature=1.5)
    answer = bound.invoke("Who?")
    assert answer.response_metadata["finish_reason"] in ("stop", "tool_calls", "length")
    for call in answer.tool_calls:
        Person.model_validate(call["args"], strict=True)


def test_a_grammar_with_left_recursion(llada2: Server) -> None:
    grammar = 'start: sum\nsum: sum "+" atom | atom\natom: /[0-9]/ | "(" sum ")"'
    text = llada2.complete("a", 40, structured_outputs={"grammar": grammar})["text"]
    assert isinstance(eval(text, {}), int)


# ---- hostile constraints

DEEP: dict[str, Any] = {"type": "null"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP, "minItems": 1}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "invalid": ({"regex": "(a"}, "not a regular expression"),
    "catastrophic": ({"regex": "((a{1,300}){1,300}){1,300}"}, "too large"),
    "budget": ({"json": {"type": "string", "minLength": 99}}, "needs at least"),
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


def workers(server: Server) -> set[psutil.Process]:
    found = set()
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {
                one for one in child.children() if "canvas_grammar.pool_process" in one.cmdline()
            }
    return found


def test_a_killed_process_is_not_a_slow_constraint(llada2: Server) -> None:
    """Requests are tried again where it was killed; and it is there again for the next one."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(llada2.post, "/v1/completions", **SLOW)
        killed: set[psutil.Process] = set()
        while not sent.done():
            for worker in workers(llada2) - killed:
                killed.add(worker)
                worker.kill()
            time.sleep(0.01)
        answer = sent.result()
    assert len(killed) == 2
    assert answer.status_code == 503, answer.text
    assert "killed" in answer.json()["error"]["message"]
    body = {"prompt": "a", "max_tokens": 30, "structured_outputs": {"regex": "next [0-9]"}}
    assert llada2.post("/v1/completions", **body).status_code == 200


# ---- options and conflicts

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
    body |= {"vllm_xargs": {"diffusion_constraint_tokens": 9}}
    refused = llada2.post("/v1/completions", **body)
    assert refused.status_code == 400 and "without max_tokens" in refused.text, refused.text


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


# ---- who has sent a request, for the order in which constraints are compiled


def scope(keys: list[str] | None, sent: str = "", client: Any = ("10.0.0.1", 9)) -> dict[str, Any]:
    headers = [(b"authorization", sent.encode())] if sent else []
    state = SimpleNamespace(args=SimpleNamespace(api_key=keys))
    return {
        "type": "http",
        "headers": headers,
        "client": client,
        "app": SimpleNamespace(state=state),
    }


def test_clients_are_known_by_their_keys_or_their_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert client_of(scope([*KEYS], f"Bearer {KEYS[1]}")) == KEYS[1]
    assert client_of(scope(None)) == client_of(scope([*KEYS])) == "10.0.0.1"
    # Nobody becomes many clients by inventing keys.
    assert client_of(scope(None, "Bearer x")) == client_of(scope([*KEYS], "Bearer x")) == "10.0.0.1"
    assert client_of(scope(None, client=None)) == "", "a Unix socket has no address"
    monkeypatch.setenv("VLLM_API_KEY", "from the environment")
    assert client_of(scope(None, "Bearer from the environment")) == "from the environment"


def endless(n: int) -> dict[str, str]:
    return {"regex": f"(a|b)*a(a|b){{26}}c{{{n + 1}}}"}


def flood(server: Server, n: int) -> httpx.Response:
    """One of many requests, by all ways in turn, whose constraint takes too long."""
    wanted = {"max_tokens": 30, "structured_outputs": endless(n)}
    schema = {"type": "string", "pattern": f"^{endless(n)['regex']}$"}
    text = {"format": {"type": "json_schema", "name": "r", "schema": schema}}
    path, ask = [
        ("completions", {"prompt": "a"} | wanted),
        ("chat/completions", {"messages": [{"role": "user", "content": "Who?"}]} | wanted),
        ("responses", {"input": "Who?", "text": text}),
    ][n % 3]
    return post_as(server, KEYS[0], f"/v1/{path}", **ask, stream=n % 2 == 1)


def post_as(server: Server, key: str, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return server.client.post(path, json={"model": "m"} | body, headers=headers)


@pytest.mark.slow
def test_slow_constraints_hold_up_nobody_else(watched: Server) -> None:
    """Nor what is compiled. What is new waits, and who must wait for too long hears of it."""

    def timed(seconds: float, key: str, **constraint: Any) -> None:
        begin = time.monotonic()
        body = {"prompt": "a", "max_tokens": 30} | constraint
        response = post_as(watched, key, "/v1/completions", **body)
        assert response.status_code == 200, response.text
        assert time.monotonic() - begin < seconds

    known = {"structured_outputs": {"regex": "known [0-9]"}}
    timed(60, KEYS[0], **known)
    with ThreadPoolExecutor(24) as pool:
        sent = [pool.submit(flood, watched, n) for n in range(24)]
        time.sleep(1)
        timed(4, KEYS[0])
        timed(4, KEYS[0], **known)
        for n in range(2):
            timed(8, KEYS[1], structured_outputs={"regex": f"other {n} [0-9]"})
        answers = [one.result() for one in sent]
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {400, 503}
    # All are from one client, and each is compiled on its own by one of two processes.
    for answer in answers:
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        if answer.status_code == 400:
            assert "more than 512 MiB" in error["message"]
        else:
            assert error["type"] == "Service Unavailable"
            assert re.search(": .* busy, try again", error["message"])
    refused = codes.index(400)
    begin = time.monotonic()
    assert flood(watched, refused).status_code == 400
    assert time.monotonic() - begin < 1, "what is too slow is known to be"
    watched.wait_until_idle()
