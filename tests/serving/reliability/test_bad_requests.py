"""Bad requests to a real server with every endpoint open, the short form of `benchmarks/fuzz.py`.

200 or 4xx with a name, and it lives on, answers as before and holds nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fuzz.bodies import Body, encoded, plan
from tests.support.fuzz.client import send, session
from tests.support.fuzz.endpoints import GENERATING, Endpoint, endpoints
from tests.support.fuzz.rules import VLLMS_OWN
from tests.support.fuzz.run import Fuzzer
from tests.support.server import Server
from tests.support.soak.models import MODELS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Bodies to each server. `make fuzz` sends 20,000.
BODIES = max(350, int(os.environ.get("VLLM_DLLM_FUZZ", "0")) // 10)


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in MODELS if name != "llada2"]


@pytest.fixture(scope="module", params=["llada2", *OTHERS])
def fuzzer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fuzzer]:
    made = Fuzzer(request.param, tmp_path_factory.mktemp("server"))
    try:
        made.server.__enter__()
        yield made
    finally:
        made.server.stop()


@pytest.fixture
def server(fuzzer: Fuzzer) -> Server:
    return fuzzer.server


@pytest.fixture
def opened(fuzzer: Fuzzer) -> list[Endpoint]:
    """The endpoints by the server's own description; one that nobody knows is an error."""
    document = httpx.get(f"{fuzzer.server.url}/openapi.json", timeout=30).json()
    return endpoints(document, fuzzer.corruption)


def test_each_endpoint_takes_its_least_body(fuzzer: Fuzzer, opened: list[Endpoint]) -> None:
    """Else what is changed in it would be refused for another reason."""

    async def ask() -> dict[str, int]:
        async with session() as client:
            found = {}
            for one in opened:
                content = encoded(one.least) if one.least else b""
                body = Body(0, one, one.path, content, (), "least")
                found[one.path] = (await send(client, fuzzer.server.url, body)).status
            return found

    statuses = asyncio.run(ask())
    # Decisions need tokens and canvases that the tiny models have not; no response has that name.
    decisions = {path: 501 for path in ("/v1/systemone", "/v1/decisions") if path in statuses}
    known = {path: 404 for path in statuses if "{response_id}" in path} | decisions
    assert {path: s for path, s in statuses.items() if s != 200} == known
    assert set(GENERATING) <= set(statuses)


def test_a_storm_of_requests(fuzzer: Fuzzer, opened: list[Endpoint]) -> None:
    bodies = plan(opened, BODIES, seed=0)
    asyncio.run(fuzzer.fuzz(bodies))
    report = fuzzer.report
    print("\n".join(report.lines()))
    assert not report.findings, "\n".join(report.lines())
    sites = {reply: fuzzer.sites[reply] for reply in fuzzer.failed}
    ours = [
        f"{reply}\n{site}"
        for reply, site in sites.items()
        if site is None or site.key not in VLLMS_OWN
    ]
    assert not ours, "\n".join(ours)
    assert not fuzzer.unnamed, "\n".join(map(str, fuzzer.unnamed))
    # Neither all taken nor all refused: the storm reaches the engine.
    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        counts = {status: report.counts[path, status] for status in (200, 400)}
        assert min(counts.values()) > len(bodies) / 50, counts
    assert report.known > BODIES / 50


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
    assert "diffusion_max_steps belongs in vllm_xargs" in answer.text


@pytest.mark.parametrize("path", LEAST)
def test_a_refused_stream(server: Server, path: str) -> None:
    """By itself vLLM would have begun it; /v1/responses then breaks off without a word."""
    body = LEAST[path][0] | {"stream": True, "vllm_xargs": {"diffusion_max_steps": 0}}
    answer = server.post(path, **body)
    assert answer.status_code == 400
    assert "diffusion_max_steps" in answer.text
