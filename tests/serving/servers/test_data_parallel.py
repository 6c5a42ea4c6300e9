"""Two data-parallel engines behind one server give what one engine gives.

Both models are mixtures of experts, whose data-parallel ranks meet in every expert layer: a rank
without requests takes part in the steps of the other.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.checkpoints import TINY
from tests.support.engine import engine
from tests.support.server import AS_SERVED, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS = ["sort 61 35 88 14", "copy abc", "reverse hello", "add 12 and 30", "count aab a"]
NO_IMAGES = {"tiny-llada2": {}, "tiny-diffusiongemma": {"image": 0, "video": 0}}
OPTIONS = {"temperature": 0.0, "seed": 7}


def alone(name: str) -> list[list[int]]:
    from vllm import SamplingParams

    options = {"limit_mm_per_prompt": NO_IMAGES[name]} if NO_IMAGES[name] else {}
    with engine(TINY / name, 32, **options) as running:
        params = SamplingParams(max_tokens=40, **OPTIONS)
        outputs = running.llm.generate(PROMPTS, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def requests_of_engines(server: Server) -> dict[str, float]:
    """Requests that ended well, by engine."""
    text = server.client.get("/metrics").text
    found: dict[str, float] = {}
    for rank, count in re.findall(
        r'^vllm:request_success_total\{engine="(\d)".* (\S+)$', text, re.M
    ):
        found[rank] = found.get(rank, 0) + float(count)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny-llada2", "tiny-diffusiongemma"])
def test_two_engines(name: str, tmp_path: Path) -> None:
    flags = ["--data-parallel-size", "2", "--api-server-count", "1"]
    if NO_IMAGES[name]:
        flags += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    with (
        Server(
            TINY / name, *flags, log=tmp_path / "log", env=AS_SERVED, start_seconds=400
        ) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        # Twice each: whichever rank a request comes to, and beside whichever others.
        asked = PROMPTS * 2
        found = list(pool.map(lambda p: server.complete(p, 40, **OPTIONS)["token_ids"], asked))
        served = requests_of_engines(server)
    assert found == alone(name) * 2
    assert set(served) == {"0", "1"}
    assert min(served.values()) > 0
