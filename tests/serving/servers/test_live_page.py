"""The live page of traces: who may see it, what it shows, and that no answer shows it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.servers.conftest import KEYS
from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import LIVE_PAGE, Server
from vllm_dllm.tracing.live import MOST_ANSWERS

pytestmark = pytest.mark.e2e

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
    """The tokens of an answer, from the events of its blocks."""
    told, decided = found["answers"][number], {}
    for index in range(told["blocks"]):
        block = found["blocks"][number, index]
        for event in block["events"]:
            decided[block["start"] + event["position"]] = event["token"]
    begin = told["prompt_length"]
    return [decided[position] for position in range(begin, begin + told["tokens"])]


def without_times(answer: Any) -> Any:
    """An answer without what differs each time, wherever it is in it."""
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
    "chat": (CHAT, {"messages": [{"role": "user", "content": "t5 t6 t7"}]}),
    "responses": ("/v1/responses", {"input": "t5 t6 t7"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "t5 t6 t7"}]}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_is_answered_as_without(name: str, watched: Server, llada2: Server) -> None:
    path, body = REQUESTS[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    default = {"prompt": "t5 t6 t7"} if path == COMPLETIONS else {}
    body = {limit: 20} | default | body
    before = news(watched)
    plain, traced = ask(llada2, path, **body), ask(watched, path, **body)
    assert without_times(traced) == without_times(plain)
    assert len(news(watched)["kept"]) > len(before["kept"]), "it is on the page"


def test_streams(watched: Server, llada2: Server) -> None:
    """Also one that puts out prefixes."""
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
        tokens = [token for each in plain for token in each["choices"][0]["token_ids"] or ()]
        of_traced = [token for each in traced for token in each["choices"][0]["token_ids"] or ()]
        assert of_traced == tokens
        assert {k for each in traced for k in each["choices"][0]} == {
            k for each in plain for k in each["choices"][0]
        }
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


def test_the_ring_is_bounded(watched: Server) -> None:
    """After the others, whose answers it pushes out."""
    gone = news(watched)["gone"]
    many = MOST_ANSWERS + 8
    answer = ask(watched, COMPLETIONS, prompt=["t5 t6"] * many, max_tokens=1)
    assert len(answer["choices"]) == many
    found = news(watched)
    assert len(found["kept"]) == MOST_ANSWERS
    assert found["gone"] >= gone + 8
    assert max(found["kept"]) == found["gone"] + MOST_ANSWERS


@pytest.mark.long
def test_a_constrained_answer_appears(tmp_path: Path) -> None:
    """Its text is as hostile as can be: the constraint leaves no other."""
    hostile = HOSTILE.removesuffix("\u202e")
    with Server(TINY_LLADA2, "--middleware", LIVE_PAGE, log=tmp_path / "log") as open_to_all:
        body = {"messages": [{"role": "user", "content": "12 + 5"}], "max_tokens": 100}
        body["structured_outputs"] = {"choice": [hostile]}
        answer = ask(open_to_all, CHAT, **body, return_token_ids=True)["choices"][0]
        assert answer["message"]["content"] == hostile
        assert "diffusion_trace" not in answer
        reply = get(open_to_all)
        assert reply.status_code == 200, "no key is asked for where the API asks for none"
        assert tokens_of(news(open_to_all), 1) == answer["token_ids"]
        texts = reply.json()["texts"]
        assert "".join(texts[str(token)] for token in answer["token_ids"][:5]) == hostile[:5]
