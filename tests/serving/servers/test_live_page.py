"""Traces over HTTP: the live page, who may see it and what it shows; and traces in answers."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.servers.conftest import KEYS
from tests.support.server import Server
from vllm_dllm import cli

pytestmark = pytest.mark.e2e

USER = [{"role": "user", "content": "t5 t6 t7"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ALLOWED = {"Authorization": f"Bearer {KEYS[1]}"}
HOSTILE = "</script><script>document.body.dataset.hacked = 'yes'</script>\x1b[31m\u202e"
# What differs between two answers to the same request.
OF_ONE_ANSWER = {"id", "created", "created_at", "completed_at", "system_fingerprint", "request_id"}


def ask(server: Server, path: str, **body: Any) -> Any:
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    return response.text if body.get("stream") else response.json()


def get(server: Server, path: str = "/dllm/traces", **more: Any) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=60, **more)


def news(server: Server) -> dict[str, Any]:
    """All that the server tells, in as many pieces as it takes."""
    found: dict[str, Any] = {"since": 0, "answers": {}, "blocks": {}}
    more, run = True, ""
    while more:
        asked = {"since": found["since"], "run": run}
        reply = get(server, params=asked, headers=ALLOWED).json()
        found |= {"since": reply["now"], "kept": reply["kept"], "gone": reply["gone"]}
        found["answers"] |= {each["number"]: each for each in reply["answers"]}
        for each in reply["blocks"]:
            found["blocks"][each["answer"], each["index"]] = each["block"]
        more, run = reply["more"], reply["run"]
    return found


def tokens_of(found: dict[str, Any], number: int) -> list[int]:
    told, decided = found["answers"][number], {}
    for index in range(told["blocks"]):
        block = found["blocks"][number, index]
        for event in block["events"]:
            decided[block["start"] + event["position"]] = event["token"]
    begin = told["prompt_length"]
    return [decided[position] for position in range(begin, begin + told["tokens"])]


def without_times(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {k: without_times(v) for k, v in answer.items() if k not in OF_ONE_ANSWER}
    return [without_times(each) for each in answer] if isinstance(answer, list) else answer


def test_off_by_default(llada2: Server) -> None:
    assert get(llada2, "/dllm").status_code == 404
    assert get(llada2).status_code == 404


def test_only_who_may_call_the_api_sees_requests(watched: Server) -> None:
    for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": f"Basic {KEYS[0]}"}):
        refused = get(watched, headers=wrong)
        assert refused.status_code == 401
        assert refused.json() == {"error": "Unauthorized"}
    for key in KEYS:
        told = get(watched, headers={"Authorization": f"Bearer {key}"})
        assert told.status_code == 200
        assert told.headers["cache-control"] == "no-store"
        assert told.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in told.headers
    # A key in the address would be in logs.
    assert get(watched, params={"key": KEYS[0], "api_key": KEYS[0]}).status_code == 401


def test_the_page_is_there_for_everybody_and_empty(watched: Server) -> None:
    ask(watched, COMPLETIONS, prompt="t5 t6 t7", max_tokens=9)
    pages = [get(watched, path) for path in ("/dllm", "/dllm/", "/behind/dllm")]
    assert {page.text for page in pages} == {pages[0].text}
    assert '<script type="application/json" id="traces">null</script>' in pages[0].text
    policy = pages[0].headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert get(watched, "/behind/dllm/traces").status_code == 401


def test_what_is_no_question(watched: Server) -> None:
    posted = httpx.post(f"{watched.url}/dllm/traces", headers=ALLOWED, timeout=60)
    assert (posted.status_code, posted.headers["allow"]) == (405, "GET, HEAD")
    for since in ("-1", "x", "9" * 30):
        assert get(watched, params={"since": since}, headers=ALLOWED).status_code == 400
    assert get(watched, "/dllm/other", headers=ALLOWED).status_code == 404


def test_requests_at_once_appear_and_answers_are_as_without(
    watched: Server, llada2: Server
) -> None:
    before = news(watched)
    prompts = ["sort 61 35 88 14", "copy abc"]
    body = {"max_tokens": 30, "ignore_eos": True, "return_token_ids": True}

    def answers(of: Server) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda it: ask(of, COMPLETIONS, prompt=it, **body), prompts))

    plain, traced = answers(llada2), answers(watched)
    assert without_times(traced) == without_times(plain), "tokens, text and fields"
    after = news(watched)
    new = set(after["kept"]) - set(before["kept"])
    expected = sorted(answer["choices"][0]["token_ids"] for answer in plain)
    assert sorted(tokens_of(after, number) for number in new) == expected
    assert {after["answers"][number]["running"] for number in new} == {False}
    again = get(watched, params={"since": after["since"]}, headers=ALLOWED).json()
    assert len(again["blocks"]) >= 4, "another run: everything"
    same = {"since": after["since"], "run": again["run"]}
    again = get(watched, params=same, headers=ALLOWED).json()
    assert again["answers"] == again["blocks"] == []


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "several": (COMPLETIONS, {"n": 2, "temperature": 0.7, "seed": 3, "logprobs": 2}),
    "prompts": (COMPLETIONS, {"prompt": ["t5 t6", "t7"], "return_token_ids": True}),
    "stop": (COMPLETIONS, {"stop": ["1"], "ignore_eos": True}),
    "step maps": (COMPLETIONS, {"vllm_xargs": {"diffusion_return_step_maps": True}}),
    "replay": (COMPLETIONS, {"vllm_xargs": {"diffusion_replay": True}}),
    "chat": (CHAT, {"messages": USER}),
    "responses": ("/v1/responses", {"input": "t5 t6 t7", "max_output_tokens": 20}),
    "messages": ("/v1/messages", {"messages": USER}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_is_answered_as_without(name: str, watched: Server, llada2: Server) -> None:
    path, body = REQUESTS[name]
    body = ({"prompt": "t5 t6 t7"} if path == COMPLETIONS else {}) | {"max_tokens": 20} | body
    before = news(watched)
    plain, traced = ask(llada2, path, **body), ask(watched, path, **body)
    assert without_times(traced) == without_times(plain)
    assert len(news(watched)["kept"]) > len(before["kept"]), "it is on the page"


def test_streams(watched: Server, llada2: Server) -> None:
    body = {"prompt": "t5 t6 t7", "max_tokens": 30, "ignore_eos": True, "stream": True}
    body |= {"temperature": 0, "return_token_ids": True}
    sequential = {"diffusion_stream_prefix": True, "diffusion_algorithm": "Sequential"}
    for options in ({}, sequential):
        plain, traced = (
            [
                without_times(json.loads(line[6:]))
                for line in ask(it, COMPLETIONS, **body, vllm_xargs=options).splitlines()
                if line.startswith("data: {")
            ]
            for it in (llada2, watched)
        )
        choices, of_traced = ([each["choices"][0] for each in it] for it in (plain, traced))
        tokens = [token for one in choices for token in one["token_ids"] or ()]
        assert [token for one in of_traced for token in one["token_ids"] or ()] == tokens
        assert {k for one in of_traced for k in one} == {k for one in choices for k in one}
        found = news(watched)
        assert tokens_of(found, found["kept"][-1]) == tokens
        assert found["answers"][found["kept"][-1]]["tokens"] == 30


def test_a_hostile_prompt_is_text(watched: Server) -> None:
    ask(watched, CHAT, messages=[{"role": "user", "content": HOSTILE}], max_tokens=8)
    reply = get(watched, headers=ALLOWED)
    assert reply.headers["content-type"] == "application/json"
    reply.text.encode("ascii")
    assert any(HOSTILE in each["name"] for each in reply.json()["answers"])
    assert HOSTILE not in get(watched, "/dllm").text


# ---- in whole answers, and `vllm-dllm watch`

QUESTION = {"messages": [{"role": "user", "content": "sort 61 35 88 14"}], "max_tokens": 40}
ALL = {"diffusion_return_step_maps": True, "diffusion_trace": True, "diffusion_replay": True}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whole_answers(path: str, llada2: Server) -> None:
    body: dict[str, Any] = QUESTION
    if path == COMPLETIONS:
        body = {"prompt": ["12 + 5", "64 + 28"], "max_tokens": 20}
    body = body | {"n": 2, "temperature": 0.5, "seed": 3, "return_token_ids": True}
    plain, traced = (
        ask(llada2, path, **body, **more)["choices"] for more in ({}, {"vllm_xargs": ALL})
    )
    assert len(traced) == (4 if path == COMPLETIONS else 2)
    for without, choice in zip(plain, traced, strict=True):
        tokens = choice["token_ids"]
        assert tokens == without["token_ids"]
        assert not {"step_maps", "diffusion_trace"} & without.keys()
        assert len(choice["step_maps"]) == len(tokens)
        assert choice["diffusion_trace"]["step_maps"] == choice["step_maps"]
        assert choice["dllm_stop_length"] == len(tokens)
        assert choice["dllm_replay_token_ids"][: len(tokens)] == tokens
        assert choice["dllm_replay_contract_version"] == 1


def test_a_client_that_leaves_is_no_error(llada2: Server) -> None:
    options = {"diffusion_trace": True, "diffusion_threshold": 1.0}
    slow = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "vllm_xargs": options}
    client = HTTPConnection("127.0.0.1", llada2.port, timeout=60)
    body = json.dumps({"model": "m"} | slow)
    client.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 60
    while not llada2.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline
    client.close()
    llada2.wait_until_idle()
    assert "Exception in ASGI application" not in llada2.log.read_text()


def test_answers_to_token_ids(llada2: Server) -> None:
    sampling = {"max_tokens": 8, "extra_args": ALL}
    answer = llada2.post("/inference/v1/generate", token_ids=[5, 6], sampling_params=sampling)
    (choice,) = answer.json()["choices"]
    assert len(choice["step_maps"]) == len(choice["token_ids"])


def test_watch_and_its_page(
    llada2: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`vllm-dllm watch` shows every pass of an answer, and writes a page with the same."""
    page = tmp_path / "out.html"
    question = "sort 61 35 88 14"
    command = ["watch", "m", question, "--url", llada2.url, "--no-color", "--html", str(page)]
    assert cli.main([*command, "--algorithm", "Sequential"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "14 35 61 88" in "".join(lines[:-1]), "at its end, in as many lines as it takes"
    data = re.search(r'id="traces">(.*?)</script>', page.read_text(), re.DOTALL)
    assert data is not None
    (line,) = json.loads(data[1])
    assert line["name"] == question
    passes = [each for block in line["trace"]["blocks"] for each in block["passes"]]
    assert lines[-1].startswith(f"all: {len(passes)} passes, ")
    assert sum("denoise: " in each for each in lines) == sum(p["kind"] == "denoise" for p in passes)
    assert cli.main(["watch", "no-such-model", question, "--url", llada2.url]) == 1
    assert "no-such-model" in capsys.readouterr().err
