"""What a client of ``vllm serve`` sees: golden tokens, by block, alone or among others.

A client that leaves in the middle of a block leaves nothing behind.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import httpx
import pytest

from tests.support import oracle
from tests.support.dashboard import missing_metrics
from tests.support.server import Server

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


def test_completions(server: Server, golden: oracle.Checkpoint) -> None:
    for case in pick(golden, 8):
        choice = server.complete(golden.prompts[case.prompt].tokens, **asked(case))
        assert choice["token_ids"] == case.output
        assert choice["finish_reason"] == case.finish_reason


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


def test_chat(server: Server, golden: oracle.Checkpoint) -> None:
    case = pick(golden, 1)[0]
    text = " ".join(f"t{i}" for i in golden.prompts[case.prompt].tokens)
    body = asked(case) | {"messages": [{"role": "user", "content": text}], "return_token_ids": True}
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == case.output


def test_sixteen_streams_at_once(server: Server, golden: oracle.Checkpoint) -> None:
    """Nobody's answer depends on who else is served."""
    cases = pick(golden, 16)
    assert len(cases) == 16

    def one(case: oracle.Case) -> list[int]:
        return list(chain(*server.stream(golden.prompts[case.prompt].tokens, **asked(case))))

    alone = [one(case) for case in cases]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, cases))
    assert together == alone == [case.output for case in cases]
    server.wait_until_idle()


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 29])
def test_max_tokens_is_exact(server: Server, golden: oracle.Checkpoint, tokens: int) -> None:
    prompt = golden.prompts["p9"].tokens
    whole = server.complete(prompt, 30, ignore_eos=True)["token_ids"]
    choice = server.complete(prompt, tokens, ignore_eos=True)
    assert choice["token_ids"] == whole[:tokens]
    assert choice["finish_reason"] == "length"


def test_several_samples_of_a_greedy_request(server: Server, golden: oracle.Checkpoint) -> None:
    """They would be equal, so vLLM refuses them; the default temperature here is 0."""
    response = server.post("/v1/completions", n=3, prompt=golden.prompts["p9"].tokens)
    assert response.status_code == 400 and "greedy sampling" in response.text


def test_no_temperature_is_greedy(server: Server, golden: oracle.Checkpoint) -> None:
    """And harnesses that always send a temperature of 0 and a seed are welcome."""
    prompt = golden.prompts["p33"].tokens
    plain = server.complete(prompt, 30)
    assert server.complete(prompt, 30, temperature=0, seed=42, top_p=0.9) == plain


def test_stop_string_and_stop_token(server: Server, golden: oracle.Checkpoint) -> None:
    """A stop inside a block cuts it there."""
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


def test_prefix_cache_is_on_and_exact(server: Server, golden: oracle.Checkpoint) -> None:
    """Page 128: a prompt of 300 tokens asked twice takes two pages from the cache."""
    prompt = (golden.prompts["p100"].tokens * 3)[:300]
    first = server.complete(prompt, 30)
    hits = server.metric("vllm:prefix_cache_hits_total")
    assert server.complete(prompt, 30) == first
    assert server.metric("vllm:prefix_cache_hits_total") - hits == 256


def test_diffusion_metrics_count(server: Server, golden: oracle.Checkpoint) -> None:
    names = [
        f"vllm:diffusion_num_{what}_total"
        for what in ("denoising_steps", "canvas_positions", "committed_tokens")
    ]
    before = [server.metric(name) for name in names]
    xargs = {"diffusion_threshold": 2.0}
    server.complete(golden.prompts["p8"].tokens, 16, ignore_eos=True, vllm_xargs=xargs)
    steps, positions, committed = (
        server.metric(name) - old for name, old in zip(names, before, strict=True)
    )
    # Two blocks, one token a step; the first is committed with a step of the second, and nobody
    # reads the last one.
    assert (steps, positions, committed) == (16, 16 * 8, 16)


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
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "vllm_xargs": {"diffusion_threshold": 2.0},
    }
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        next(line for line in response.iter_lines() if line.startswith("data: {"))


def test_nothing_is_held(server: Server, golden: oracle.Checkpoint) -> None:
    prompt = golden.prompts["p33"].tokens
    expected = server.complete(prompt, 30, ignore_eos=True)
    # More of them than there are slots: a leaked slot would stop the last ones.
    for _ in range(20):
        leave_after_first_event(server, golden.prompts["p100"].tokens)
    server.wait_until_idle()
    assert server.complete(prompt, 30, ignore_eos=True) == expected


def test_others_do_not_notice(server: Server, golden: oracle.Checkpoint) -> None:
    prompts = [p.tokens for p in golden.prompts.values()][:8]
    alone = [server.complete(prompt, 60, ignore_eos=True)["token_ids"] for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        leaving = [
            pool.submit(leave_after_first_event, server, golden.prompts["p100"].tokens)
            for _ in range(8)
        ]
        staying = [pool.submit(server.complete, prompt, 60, ignore_eos=True) for prompt in prompts]
        assert [future.result()["token_ids"] for future in staying] == alone
        for future in leaving:
            future.result()
    server.wait_until_idle()


@pytest.mark.long
def test_a_canvas_that_is_only_edited(server: Server, golden: oracle.Checkpoint) -> None:
    """Its client leaves, and it does not use up the steps that it was allowed."""
    steps = "vllm:diffusion_num_denoising_steps_total"
    options = {
        "diffusion_algorithm": "JointThreshold",
        "diffusion_threshold": 0.0,  # all masks in one step
        "diffusion_edit_threshold": 0.0,
        "diffusion_max_post_edit_steps": 32,
    }
    # Eight answers take far longer than the client waits, on a quick machine as well.
    body = {"model": "m", "prompt": [golden.prompts["p33"].tokens] * 8, "max_tokens": 400}
    body |= {"ignore_eos": True, "vllm_xargs": options}
    before = server.metric(steps)
    assert server.post("/v1/completions", **body).status_code == 200
    whole = server.metric(steps) - before
    assert whole > 10 * 400 / golden.block_size, "mostly edits"
    url = "/v1/completions"
    for streamed in (False, True):
        before = server.metric(steps)
        if streamed:  # events come faster than any time-out: leave after the first one
            with server.client.stream("POST", url, json=body | {"stream": True}) as response:
                assert next(response.iter_lines()).startswith("data:")
        else:
            with pytest.raises(httpx.ReadTimeout):
                server.client.post(url, json=body, timeout=0.3)
        server.wait_until_idle(5)
        assert server.metric(steps) - before < whole / 2
