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

from tests.support.fuzz.bodies import plan
from tests.support.fuzz.endpoints import Endpoint, endpoints
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


# An endpoint's least request.
QUESTION, STEPS = "count from 12 to 16", "vllm:diffusion_num_denoising_steps_total"
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": QUESTION, "max_tokens": 30},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 30},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 30},
}


@pytest.mark.parametrize("path", LEAST)
def test_where_options_go(server: Server, path: str) -> None:
    def steps(**extra: Any) -> float:
        server.wait_until_idle()
        before = server.metric(STEPS)
        body = LEAST[path] | {"temperature": 0, "ignore_eos": True, "vllm_xargs": extra}
        answer = server.post(path, **body)
        assert answer.status_code == 200, answer.text
        server.wait_until_idle()
        return server.metric(STEPS) - before

    assert steps(diffusion_max_steps=1) < steps(diffusion_max_steps=6)
