"""Counters by decoding algorithm over HTTP, beside vLLM's own."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm.benchmarks.serve import fetch_diffusion_metrics

from tests.support import oracle
from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import AS_SERVED, Server
from vllm_dllm.decoding.registry import algorithms
from vllm_dllm.metrics import COUNTERS, metric_name

pytestmark = pytest.mark.e2e

KINDS = {"denoise": "denoising_steps", "commit": "commit_passes", "wait": "waiting_passes"}
# Without those that other tests register in this process.
NAMES = [a.name for a in algorithms("mask") if type(a).__module__.startswith("vllm_dllm.")]


def counted(server: Server) -> Counter[tuple[str, str, str]]:
    """(engine, algorithm, counter) -> its value."""
    names = {f"{metric_name(counter)}_total": counter for counter in COUNTERS}
    text = server.client.get("/metrics").text
    found: Counter[tuple[str, str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                assert sample.labels.keys() == {"model_name", "engine", "algorithm"}
                key = (sample.labels["engine"], sample.labels["algorithm"], names[sample.name])
                assert key not in found
                found[key] = int(sample.value)
    return found


def vllms_own(server: Server) -> Counter[str]:
    """The counters of diffusion as `vllm bench serve` reads them: all that are named alike."""

    async def fetch() -> Any:
        async with aiohttp.ClientSession() as session:
            return await fetch_diffusion_metrics(server.url, session)

    return Counter(vars(asyncio.run(fetch())))


def test_every_algorithm_has_its_counters_from_the_start(server: Server) -> None:
    assert set(counted(server)) == {("0", name, counter) for name in NAMES for counter in COUNTERS}


def test_counters_of_a_request(server: Server, golden: oracle.Checkpoint) -> None:
    """Two blocks of 8, one token a step, beside which another algorithm counts nothing."""
    own, before = vllms_own(server), counted(server)
    xargs = {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 2.0}
    server.complete(golden.prompts["p8"].tokens, 16, ignore_eos=True, vllm_xargs=xargs)
    server.wait_until_idle()
    # The first block is committed with a step of the second, and nobody reads the last one.
    assert vllms_own(server) - own == Counter(
        num_denoising_steps=16, num_canvas_positions=16 * 8, num_committed_tokens=16
    )
    assert counted(server) - before == {
        ("0", "LowConfidence", "denoising_steps"): 16,
        ("0", "LowConfidence", "blocks"): 2,
        ("0", "LowConfidence", "committed_tokens"): 16,
        ("0", "LowConfidence", "generation_tokens"): 16,
        ("0", "LowConfidence", "finished_requests"): 1,
    }


@pytest.mark.slow
@pytest.mark.long
def test_two_engines_and_two_api_servers(tmp_path: Path) -> None:
    """Each process has a part of the counts; `/metrics` of any of them adds them up."""
    flags = ("--data-parallel-size", "2", "--api-server-count", "2")
    with Server(
        TINY_LLADA2, *flags, log=tmp_path / "log", env=AS_SERVED, start_seconds=400
    ) as server:

        def ask(number: int) -> tuple[str, dict[str, Any]]:
            name = NAMES[number % len(NAMES)]
            xargs = {"diffusion_algorithm": name, "diffusion_trace": 1}
            choice = server.complete("sort 61 35 88 14", 40, vllm_xargs=xargs)
            return name, choice

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(24)))
        server.wait_until_idle()
        found = counted(server)
    expected: Counter[tuple[str, str]] = Counter()
    for name, choice in answers:
        blocks = choice["diffusion_trace"]["blocks"]
        expected[name, "finished_requests"] += 1
        expected[name, "generation_tokens"] += len(choice["token_ids"])
        expected[name, "blocks"] += len(blocks)
        expected.update((name, KINDS[each["kind"]]) for block in blocks for each in block["passes"])
    assert {engine for engine, _, _ in found} == {"0", "1"}
    for key, value in expected.items():
        assert sum(found[engine, *key] for engine in "01") == value, key
    for engine in "01":
        assert sum(value for key, value in found.items() if key[0] == engine) > 0
