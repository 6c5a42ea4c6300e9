"""Bad requests to a real server, many at a time: 200 or 4xx with a name, and it lives on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e.server import Server
from tests.reliability.strategies import JSON, NUMBERS, SCALARS, TEXTS
from tests.reliability.test_bad_input import MASKED, STEP, UNIFORM

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHECKPOINTS = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "checkpoints"
CANVAS, VOCABULARY = 32, 272
AT_ONCE = 16
# Requests to each server: 96 to /v1/completions and 48 to each other endpoint, or a fiftieth of
# the long run.
LONG = int(os.environ.get("VLLM_DLLM_FUZZ", "0")) // 50 // AT_ONCE

IDS = st.integers(0, VOCABULARY - 1)
MANY = st.lists(IDS | NUMBERS, max_size=3) | st.lists(IDS, max_size=VOCABULARY)
ORDINARY: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300) | st.just(2**31),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(0, 3),
    "max_tokens": st.integers(0, 80),
    "min_tokens": st.integers(0, 40),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    # Not what a float32 does not hold: see the last test.
    "repetition_penalty": st.floats(1e-6, 3) | st.sampled_from([0.0, 1e-30, 1e30]),
    "logprobs": st.integers(-2, 25),
    "logprob_token_ids": MANY,
    "logit_bias": st.dictionaries(IDS.map(str) | TEXTS, NUMBERS, max_size=40),
    "allowed_token_ids": MANY,
    "bad_words": st.lists(TEXTS, max_size=3),
    "stop": TEXTS | st.lists(TEXTS, max_size=6),
    "stop_token_ids": MANY,
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(-1, 3),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "x"}]),
    "structured_outputs": st.sampled_from([{"regex": "a+"}, {"choice": ["a"]}, {}]),
    "thinking_token_budget": st.integers(-1, 3),
    "truncate_prompt_tokens": st.integers(-1, 40),
    "stream": st.booleans(),
}
# What chat calls otherwise, or has beside these.
CHAT = ORDINARY | {
    "max_completion_tokens": st.integers(0, 80),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-2, 25),
    "add_generation_prompt": st.booleans(),
}
FORMATS = st.sampled_from([{"type": "text"}, {"type": "json_object"}])
# /v1/responses knows fewer, and those of the others are refused: they are not sent. Nor are
# streams: vLLM breaks off without a word when it refuses one that has begun.
RESPONSES = {
    name: ORDINARY[name]
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "logit_bias"),
        *("frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos"),
        "structured_outputs",
    )
} | {
    "max_output_tokens": st.integers(-1, 80),
    "top_logprobs": st.integers(-2, 25),
    "include": st.just(["message.output_text.logprobs"]),
    "text": FORMATS.map(lambda kind: {"format": kind}),
    "instructions": TEXTS,
}
CANVASES = st.lists(IDS, min_size=CANVAS, max_size=CANVAS)
EXTRA: dict[str, st.SearchStrategy[Any]] = {
    "diffusion_algorithm": st.sampled_from(
        sorted({a for a, _ in MASKED.values()} | {"JointThreshold-S"})
    ),
    "diffusion_max_steps": st.integers(1, 40) | STEP.edges(),
    "diffusion_canvas_length": st.integers(0, CANVAS + 1) | STEP.edges(),
    "diffusion_seed_canvas": CANVASES | MANY,
    "diffusion_pinned": st.lists(st.integers(0, CANVAS), max_size=4) | MANY,
    "diffusion_read_only": st.integers(0, 2),
    "diffusion_constrained": st.integers(0, 2),
    "diffusion_stream_prefix": st.integers(0, 2),
    "somebody_elses": SCALARS,
} | {f"diffusion_{n}": t[n][1].edges() for t in (MASKED, UNIFORM) for n in t}
EXTRA["diffusion_unheard_of"] = EXTRA["diffusion_thresholds"] = st.just(1)
WILD = JSON.filter(lambda v: not isinstance(v, int) or abs(v) < 100 or abs(v) > 10**9)


@st.composite
def some(draw: Any, options: dict[str, st.SearchStrategy[Any]], most: int) -> dict[str, Any]:
    """A few of the options, mostly with values of their kind."""
    names = draw(st.lists(st.sampled_from(sorted(options)), max_size=most, unique=True))
    wild = draw(st.integers(0, 3)) == 0
    # vLLM itself answers 500 to `structured_outputs` that are a list.
    tame = {"structured_outputs"}
    return {name: draw(WILD if wild and name not in tame else options[name]) for name in names}


TEXT = st.just("copy ab") | st.just("copy ab " * 70) | TEXTS.filter(bool)
PROMPTS = {
    "/v1/completions": st.fixed_dictionaries(
        {
            "prompt": st.lists(IDS, min_size=1, max_size=70) | st.just([5] * 480) | TEXT,
            "max_tokens": st.just(8),
        }
    ),
    "/v1/chat/completions": st.fixed_dictionaries(
        {
            "messages": TEXT.map(lambda text: [{"role": "user", "content": text}]),
            "max_tokens": st.just(8),
        }
    ),
    "/v1/responses": st.fixed_dictionaries({"input": TEXT, "max_output_tokens": st.just(8)}),
}
OPTIONS = dict(zip(PROMPTS, (ORDINARY, CHAT, RESPONSES), strict=True))


@st.composite
def bodies(draw: Any, path: str) -> dict[str, Any]:
    body = {"model": "m"} | draw(PROMPTS[path]) | draw(some(OPTIONS[path], 4))
    if extra := draw(some(EXTRA, 3)):
        body["vllm_xargs"] = extra
    return body


@pytest.fixture(scope="module", params=["tiny-llada2", "tiny-diffusiongemma"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--additional-config", '{"dllm": {"max_steps": 40}}']
    if request.param == "tiny-diffusiongemma":
        flags += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(CHECKPOINTS / request.param, *flags, log=log) as running:
        yield running


def plain(server: Server) -> list[int]:
    prompt = "sort 61 35 88 14"
    return server.complete(prompt, 40, temperature=0, seed=7)["token_ids"]


def names_in(body: dict[str, Any]) -> list[str]:
    """What an answer may name: what was given, or what vLLM calls it."""
    extra = body.get("vllm_xargs", {})
    called = {"vllm_xargs", "extra_args"} if extra else set()
    if {"response_format", "structured_outputs", "text"} & set(body):
        called.add("structured")
    if {"max_completion_tokens", "max_output_tokens"} & set(body):
        called.add("max_tokens")
    if {"messages", "input"} & set(body):
        called.add("context length")
    return [*(set(body) - {"model"}), *extra, *called]


def send(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, str]:
    # Not `json=`: nan and inf are refused there, and by no server that reads JSON with Python.
    response = client.post(path, content=json.dumps(body))
    if response.status_code == 200 and response.text.startswith("data: "):
        # A stream has begun before its request is refused.
        for line in response.text.splitlines():
            if line.startswith('data: {"error"'):
                return json.loads(line[6:])["error"]["code"], line
    return response.status_code, response.text


def complaint(body: dict[str, Any], status: int, text: str) -> str | None:
    if status == 200 or (400 <= status < 500 and any(name in text for name in names_in(body))):
        return None
    return f"{status} {text[:500]} for {json.dumps(body)[:2000]}"


@pytest.mark.parametrize("path", PROMPTS)
def test_a_storm_of_requests(server: Server, path: str) -> None:
    before, seen = plain(server), Counter[int]()
    # A connection for each request: the server closes idle ones, maybe while one is sent.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    client = httpx.Client(base_url=server.url, timeout=120, headers=headers)
    pool = ThreadPoolExecutor(AT_ONCE)

    @settings(
        max_examples=max(LONG, 6 if path == "/v1/completions" else 3),
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(bodies(path), min_size=AT_ONCE, max_size=AT_ONCE))
    def storm(requests: list[dict[str, Any]]) -> None:
        answers = list(pool.map(lambda body: send(client, path, body), requests))
        seen.update(status for status, _ in answers)
        wrong = [complaint(b, *a) for b, a in zip(requests, answers, strict=True)]
        assert not any(wrong), "\n".join(filter(None, wrong))

    with client, pool:
        storm()
        assert client.get("/health").status_code == 200
    assert plain(server) == before
    server.wait_until_idle()
    # Neither all taken nor all refused: the storm reaches the engine.
    assert min(seen[200], seen[400]) > sum(seen.values()) / 10, seen


def test_a_penalty_that_no_float32_holds(server: Server) -> None:
    body = {"prompt": "copy ab", "max_tokens": 8, "repetition_penalty": 1e-46}
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 200 or "repetition_penalty" in answer.text


# An endpoint's least request, and where it says how many tokens were put out.
LEAST: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "count from 12 to 16", "max_tokens": 30}, "completion_tokens"),
    "/v1/chat/completions": (
        {
            "messages": [{"role": "user", "content": "count from 12 to 16"}],
            "max_completion_tokens": 30,
        },
        "completion_tokens",
    ),
    "/v1/responses": ({"input": "count from 12 to 16", "max_output_tokens": 30}, "output_tokens"),
}


STEPS = "vllm:diffusion_num_denoising_steps_total"


@pytest.mark.parametrize("path", LEAST)
def test_where_options_go(server: Server, path: str) -> None:
    """In `vllm_xargs`, on every endpoint: they are heeded there, and refused by their name."""
    body, tokens = LEAST[path]
    body = body | {"temperature": 0, "ignore_eos": True}

    def steps(**extra: Any) -> float:
        server.wait_until_idle()
        before = server.metric(STEPS)
        answer = server.post(path, **body, vllm_xargs=extra)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"][tokens] == 30
        server.wait_until_idle()
        return server.metric(STEPS) - before

    assert steps(diffusion_max_steps=1) < steps(diffusion_max_steps=6)
    for extra in ({"diffusion_max_steps": 0}, {"diffusion_max_step": 1}):
        answer = server.post(path, **body, vllm_xargs=extra)
        assert answer.status_code == 400, answer.text
        assert "diffusion_max_steps" in answer.text


@pytest.mark.parametrize("path", LEAST)
def test_an_option_beside_vllm_xargs(server: Server, path: str) -> None:
    """Where OpenAI's client puts `extra_body`; vLLM passes over what it does not know there."""
    answer = server.post(path, **LEAST[path][0], diffusion_max_steps=4)
    assert answer.status_code == 400, answer.text
    assert "diffusion_max_steps belongs into vllm_xargs" in answer.text


@pytest.mark.parametrize("path", LEAST)
def test_a_refused_stream(server: Server, path: str) -> None:
    """By itself vLLM would have begun it; /v1/responses then breaks off without a word."""
    body = LEAST[path][0] | {"stream": True, "vllm_xargs": {"diffusion_max_steps": 0}}
    answer = server.post(path, **body)
    assert answer.status_code == 400
    assert "diffusion_max_steps" in answer.text
