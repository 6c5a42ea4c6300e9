"""Counters by decoding algorithm over HTTP, and vLLM's own benchmark beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import oracle
from tests.support.checkpoints import TINY_LLADA2
from tests.support.server import AS_SERVED, Server
from vllm_dllm.decoding.names import algorithms
from vllm_dllm.metrics import COUNTERS, metric_name

pytestmark = pytest.mark.e2e

KINDS = {"denoise": "denoising_steps", "commit": "commit_passes", "wait": "waiting_passes"}
BENCHED = 32
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


def grown(server: Server, before: Counter[tuple[str, str, str]]) -> Counter[tuple[str, str]]:
    """(algorithm, counter) -> by how much it has grown in all engines."""
    found: Counter[tuple[str, str]] = Counter()
    for (engine, algorithm, counter), value in counted(server).items():
        found[algorithm, counter] += value - before[engine, algorithm, counter]
    return found


def test_every_algorithm_has_its_counters_from_the_start(server: Server) -> None:
    assert set(counted(server)) == {("0", name, counter) for name in NAMES for counter in COUNTERS}


def test_counters_of_a_request(server: Server, golden: oracle.Checkpoint) -> None:
    """Two blocks of 8, one token a step, beside which another algorithm counts nothing."""
    before = counted(server)
    xargs = {"diffusion_algorithm": "LowConfidence", "diffusion_threshold": 2.0}
    server.complete(golden.prompts["p8"].tokens, 16, ignore_eos=True, vllm_xargs=xargs)
    server.wait_until_idle()
    assert {key: value for key, value in grown(server, before).items() if value} == {
        ("LowConfidence", "denoising_steps"): 16,
        ("LowConfidence", "blocks"): 2,
        ("LowConfidence", "committed_tokens"): 16,
        ("LowConfidence", "generation_tokens"): 16,
        ("LowConfidence", "finished_requests"): 1,
    }


def bench(server: Server, golden: oracle.Checkpoint, result: Path, xargs: dict[str, Any]) -> Any:
    """The figures of ``vllm bench serve``."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    done = subprocess.run(
        [
            *(vllm, "bench", "serve", "--base-url", server.url, "--backend", "openai"),
            *("--model", "m", "--tokenizer", str(golden.path), "--ready-check-timeout-sec", "0"),
            *("--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "20"),
            *("--num-prompts", str(BENCHED), "--max-concurrency", "8", "--ignore-eos"),
            *("--extra-body", json.dumps({"vllm_xargs": xargs})),
            *("--save-result", "--result-filename", str(result)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.long
def test_vllm_bench_serve(server: Server, golden: oracle.Checkpoint, tmp_path: Path) -> None:
    """Its figures are those of the counters.

    Catches counters by algorithm that it adds to vLLM's own, because of their names.
    """
    names = [
        f"vllm:diffusion_num_{what}_total" for what in ("canvas_positions", "committed_tokens")
    ]
    own, before = [server.metric(name) for name in names], counted(server)
    xargs = {"diffusion_algorithm": "LowConfidence"}
    figures = bench(server, golden, tmp_path / "result.json", xargs)
    server.wait_until_idle()
    assert (figures["completed"], figures["failed"]) == (BENCHED, 0)
    assert figures["total_output_tokens"] == 20 * BENCHED
    for name in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms"):
        assert 0 < figures[name] < 1e6, name
    positions, committed = (server.metric(name) - n for name, n in zip(names, own, strict=True))
    assert figures["diffusion_canvas_positions"] == positions
    assert figures["diffusion_committed_tokens"] == committed
    growth = grown(server, before)
    assert growth["LowConfidence", "finished_requests"] == BENCHED
    assert growth["LowConfidence", "generation_tokens"] == figures["total_output_tokens"]


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
        expected[name, "finished_requests"] += 1
        expected[name, "generation_tokens"] += len(choice["token_ids"])
        for block in choice["diffusion_trace"]["blocks"]:
            expected[name, "blocks"] += 1
            expected.update((name, KINDS[each["kind"]]) for each in block["passes"])
    sums: Counter[tuple[str, str]] = Counter()
    engines: Counter[str] = Counter()
    for (engine, name, counter), value in found.items():
        sums[name, counter] += value
        engines[engine] += value
    assert engines.keys() == {"0", "1"} and min(engines.values()) > 0
    for name in NAMES:
        for counter in (*KINDS.values(), "blocks", "generation_tokens", "finished_requests"):
            assert sums[name, counter] == expected[name, counter], (name, counter)
