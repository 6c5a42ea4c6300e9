"""Bad requests to a real server, the short form of `benchmarks/fuzz.py`.

200 or 4xx with a name, and it lives on, answers as before and holds nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import httpx
import pytest

from tests.support.fuzz.bodies import plan
from tests.support.fuzz.endpoints import endpoints
from tests.support.fuzz.run import Fuzzer
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


def test_a_storm_of_requests(fuzzer: Fuzzer) -> None:
    document = httpx.get(f"{fuzzer.server.url}/openapi.json", timeout=30).json()
    bodies = plan(endpoints(document, fuzzer.corruption), BODIES, seed=0)
    asyncio.run(fuzzer.storm(bodies))
    print(fuzzer.figures())
    assert not fuzzer.findings, "\n".join(fuzzer.findings)
    assert not fuzzer.unnamed, "\n".join(map(str, fuzzer.unnamed))
    # Neither all taken nor all refused: the storm reaches the engine.
    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        counts = {status: fuzzer.counts[path, status] for status in (200, 400)}
        assert min(counts.values()) > len(bodies) / 50, counts
    assert fuzzer.checked > BODIES / 50
