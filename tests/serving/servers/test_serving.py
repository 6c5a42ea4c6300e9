"""What a client of ``vllm serve`` sees: golden tokens, by block, alone or among others.

A client that leaves in the middle of a block leaves nothing behind.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers.conftest import TOOLS
from tests.serving.servers.test_reasoning_families import TOOL, chat
from tests.support import oracle, reference_nemotron
from tests.support.checkpoints import TINY_SDAR
from tests.support.dashboard import missing_metrics
from tests.support.decisions import with_bytes
from tests.support.families import FAMILIES
from tests.support.long import long_but
from tests.support.mistakes_in_requests import url_of
from tests.support.reference_vision import MASK, SHOWN, START, Pictured, picture
from tests.support.server import Pool, Server

pytestmark = pytest.mark.e2e


def asked(case: oracle.Case) -> dict[str, Any]:
    return {
        "max_tokens": case.params["max_new_tokens"],
        "ignore_eos": case.params["ignore_eos"],
        "vllm_xargs": {"diffusion_threshold": case.params["threshold"]},
    }


def pick(golden: oracle.Checkpoint, count: int) -> list[oracle.Case]:
    cases = oracle.robust_primary(golden, "low_confidence")
    return cases[:: max(1, len(cases) // count)][:count]


def test_completions_and_chats(server: Server, golden: oracle.Checkpoint) -> None:
    for case in pick(golden, 8):
        tokens = golden.prompts[case.prompt].tokens
        choice = server.complete(tokens, **asked(case))
        assert choice["token_ids"] == case.output
        assert choice["finish_reason"] == case.finish_reason
    for case in pick(golden, 1):
        tokens = golden.prompts[case.prompt].tokens
        chat = [{"role": "user", "content": " ".join(f"t{token}" for token in tokens)}]
        body = asked(case) | {"messages": chat, "return_token_ids": True}
        answer = server.post("/v1/chat/completions", **body)
        assert answer.json()["choices"][0]["token_ids"] == case.output, answer.text


def test_streamed_by_block(server: Server, golden: oracle.Checkpoint) -> None:
    """Events are whole blocks: not one token each, and not the answer in one piece."""
    for case in pick(golden, 8):
        prompt = golden.prompts[case.prompt].tokens
        events = server.stream(prompt, **asked(case))
        assert list(chain(*events)) == case.output
        first = golden.block_size - len(prompt) % golden.block_size
        lengths = [first] + [golden.block_size] * (len(events) - 1)
        assert [len(event) for event in events[:-1]] == lengths[:-1]


def test_streamed_prefixes(server: Server, golden: oracle.Checkpoint) -> None:
    """With ``diffusion_stream_prefix`` what is decided and contiguous comes before its block."""
    finer = 0
    for case in pick(golden, 8):
        prompt, body = golden.prompts[case.prompt].tokens, asked(case)
        blocks = server.stream(prompt, **body)
        body["vllm_xargs"] = body["vllm_xargs"] | {"diffusion_stream_prefix": 1}
        events = server.stream(prompt, **body)
        assert list(chain(*events)) == case.output
        finer += len(events) - len(blocks)
    assert finer > 8
    server.wait_until_idle()


def test_sixteen_streams_at_once(server: Server, golden: oracle.Checkpoint) -> None:
    cases = pick(golden, 16)
    assert len(cases) == 16

    def one(case: oracle.Case) -> list[int]:
        return list(chain(*server.stream(golden.prompts[case.prompt].tokens, **asked(case))))

    alone = [one(case) for case in cases]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, cases))
    assert together == alone == [case.output for case in cases]
    server.wait_until_idle()


def test_stop_string_and_stop_token(server: Server, golden: oracle.Checkpoint) -> None:
    prompt = golden.prompts["p9"].tokens
    whole = server.complete(prompt, 30, ignore_eos=True)["token_ids"]
    at = next(i for i in range(10, 30) if whole[i] not in whole[:i])
    choice = server.complete(prompt, 30, ignore_eos=True, stop_token_ids=[whole[at]])
    assert choice["token_ids"] == whole[: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[at])
    word = f"t{whole[at]}"
    choice = server.complete(prompt, 30, ignore_eos=True, stop=[word])
    assert choice["finish_reason"] == "stop"
    assert choice["text"].split() == [f"t{i}" for i in whole[:at]]


def test_the_dashboard_finds_its_metrics(server: Server, golden: oracle.Checkpoint) -> None:
    server.complete(golden.prompts["p8"].tokens, 16)
    assert missing_metrics(server.url) == []


def test_tools_without_a_parser(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": [{"role": "user", "content": "t5"}], "max_tokens": 8, "tools": [tool]}
        answer = server.post("/v1/chat/completions", **body, tool_choice=choice)
        assert answer.status_code == 400 and "--tool-call-parser" in answer.text, answer.text


# ---- clients that leave


def leave_after_first_event(server: Server, prompt: list[int]) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
    body |= {"vllm_xargs": {"diffusion_threshold": 2.0}}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        next(line for line in response.iter_lines() if line.startswith("data: {"))


def test_nobody_notices_and_nothing_is_held(server: Server, golden: oracle.Checkpoint) -> None:
    prompts = [p.tokens for p in golden.prompts.values()][:8]
    alone = [server.complete(prompt, 60, ignore_eos=True)["token_ids"] for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        # More of them than there are slots: a leaked slot would stop the last ones.
        leaving = [
            pool.submit(leave_after_first_event, server, golden.prompts["p100"].tokens)
            for _ in range(20)
        ]
        staying = [pool.submit(server.complete, prompt, 60, ignore_eos=True) for prompt in prompts]
        assert [future.result()["token_ids"] for future in staying] == alone
        for future in leaving:
            future.result()
    server.wait_until_idle()
    assert server.complete(prompts[0], 60, ignore_eos=True)["token_ids"] == alone[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdar-vl", "nemotron-vlm"])
def test_chats_with_pictures(pool: Pool, tmp_path: Path, name: str) -> None:
    """The tokens of the reference, streamed or not; a picture that is none is refused alone."""
    family = FAMILIES[name]
    family.make(tmp_path, 4)
    reference = family.reference(tmp_path)
    assert isinstance(reference, Pictured)
    served = pool.get(tmp_path, "--limit-mm-per-prompt", '{"image": 2}')
    sizes = [(1, 90, 60), (2, 30, 70)]
    text = {"type": "text", "text": "t5 t6 t7"}

    def asked(urls: list[str]) -> dict[str, Any]:
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        chat = [{"role": "user", "content": [*shown, text]}]
        return {"messages": chat, "max_tokens": 20, "temperature": 0, "ignore_eos": True}

    urls = [url_of(picture(*size)) for size in sizes]
    prompt = reference.shown([reference.placeholder] * 2 + [5, 6, 7], sizes)
    wanted = reference.generate(prompt, 20, family.default or family.rules[0]).tokens
    # Requests with the same picture at once may find vLLM's two caches of pictures to differ.
    own, broken = url_of(picture(3, 40, 40)), "data:image/png;base64,AAAA"
    with ThreadPoolExecutor(2) as threads:
        whole = threads.submit(
            served.post, "/v1/chat/completions", **asked(urls), return_token_ids=True
        )
        bad = threads.submit(served.post, "/v1/chat/completions", **asked([own, broken]))
    answer = whole.result().json()
    assert answer["usage"]["prompt_tokens"] == len(prompt), answer
    assert answer["choices"][0]["token_ids"] == wanted
    assert bad.result().status_code == 400, bad.result().text
    events = served.events("chat/completions", **asked(urls))
    assert len(events) > 1 and list(chain(*events)) == wanted
    many = served.post("/v1/chat/completions", **asked([urls[0]] * 3))
    assert many.status_code == 400 and "At most 2 image" in many.text
    served.wait_until_idle()


# How tokenizers of bytes spell what is not text; 11, their comma, ends an answer of Nemotron's.
WORDS: dict[str, dict[str, str | int]] = {
    "sdar-vl": {"<|image_pad|>": SHOWN, "<|MASK|>": MASK},
    "nemotron-vlm": {"<|image_start|>": START, "<|mask|>": reference_nemotron.MASK, ",": 265},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["sdar-vl"], WORDS))
def test_constraints_beside_pictures(pool: Pool, tmp_path: Path, name: str) -> None:
    """A schema, tools and reported logprobs, with a model that would write noise without them."""
    FAMILIES[name].make(tmp_path, 8)
    with_bytes(tmp_path, TINY_SDAR, WORDS[name])
    served = pool.get(tmp_path, *TOOLS, "hermes")
    shown = {"type": "image_url", "image_url": {"url": url_of(picture(1, 90, 60))}}
    content = [shown, {"type": "text", "text": "what is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 80}
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    constraint = {"structured_outputs": {"json": schema}, "temperature": 0}
    answers = [chat(served, stream, **body, **constraint) for stream in (False, True)]
    assert answers[0] == answers[1] and json.loads(answers[0])["n"] in (1, 2)
    calls = body | {"tools": [TOOL], "tool_choice": "required", "logprobs": True}
    response = served.post("/v1/chat/completions", **calls)
    assert response.status_code == 200, response.text
    answer = response.json()["choices"][0]
    assert [*json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"])] == ["days"]
    reported = answer["logprobs"]["content"]
    assert reported and all(one["logprob"] <= 0 for one in reported)
