"""The simulated router: every request is served once, known limits, and policies that differ."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import router_simulation as router
from benchmarks.arrivals import TRACES, Prefixes, Request, Spread, Workload, gamma_gaps, log_normal
from benchmarks.replicas import POLICIES, Engine, Outcome, quantile, simulate
from benchmarks.tables import TABLES
from tests.support.checkpoints import ROOT


def fixed(seconds: float) -> Engine:
    """A replica that serves one request at a time, in a step of a fixed length."""
    return Engine(lambda _requests, _prompt, _begun: seconds, seats=1)


def batching(seats: int = 8, cache_tokens: int = 1 << 20) -> Engine:
    """A replica whose steps take longer with more requests and prompt tokens."""
    return Engine(
        lambda requests, prompt, _begun: 0.01 + 0.001 * requests + 0.0001 * prompt,
        seats,
        budget=512,
        cache_tokens=cache_tokens,
        page=32,
    )


def drawn(count: int, rate: float, prefixes: int = 50, seed: int = 0) -> list[Request]:
    load = Workload(TRACES["conversation"], Prefixes(prefixes), rate, per_pass=8.0)
    return load.draw(count, seed)


def one_pass(count: int, rate: float, variation: float, seed: int = 0) -> list[Request]:
    """Requests of one step each, without prompts."""
    gaps, now, requests = gamma_gaps(Spread(1 / rate, variation), count, random.Random(seed)), 0, []
    for number, gap in enumerate(gaps):
        now += gap
        requests.append(Request(number, now, prefix=number, shared=0, own=0, tokens=1, passes=1))
    return requests


def mean_wait(outcome: Outcome, service: float) -> float:
    return statistics.mean(outcome.latencies) - service


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_every_request_is_served_once(policy: str, replicas: int) -> None:
    requests = drawn(300, rate=20.0)
    outcome = simulate(requests, batching(), replicas, POLICIES[policy])
    assert sorted(number for number, _ in outcome.served) == list(range(300))
    assert {place for _, place in outcome.served} == set(range(replicas))
    assert outcome.tokens == sum(request.tokens for request in requests)
    # A request takes no less than its passes, each of the least length.
    for request, latency in zip(requests, outcome.latencies, strict=True):
        assert latency >= request.passes * 0.011 - 1e-9
    assert 0 < outcome.busy <= 1 and 0 <= outcome.hit_rate < 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_outcome(policy: str) -> None:
    outcomes = [
        simulate(drawn(200, 20.0, seed=seed), batching(), 3, POLICIES[policy]) for seed in (1, 1, 2)
    ]
    assert outcomes[0] == outcomes[1] != outcomes[2]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_seat_is_the_queue_m_d_1(load: float) -> None:
    """Poisson arrivals, a fixed service time: the mean wait is s rho / (2 (1 - rho))."""
    service = 0.1
    requests = one_pass(60_000, load / service, variation=1.0)
    found = mean_wait(simulate(requests, fixed(service), 1, POLICIES["round robin"]), service)
    assert found == pytest.approx(service * load / (2 * (1 - load)), rel=0.08)


def test_bursts_wait_longer_and_regular_arrivals_do_not_wait() -> None:
    waits = []
    for variation in (0.01, 1.0, 3.0):
        requests = one_pass(20_000, 6.0, variation)
        waits.append(mean_wait(simulate(requests, fixed(0.1), 1, POLICIES["round robin"]), 0.1))
    assert waits[0] == pytest.approx(0, abs=1e-6)
    assert waits[0] < waits[1] < waits[2] / 3


def test_without_load_a_request_takes_its_own_steps() -> None:
    request = Request(0, 5.0, prefix=0, shared=64, own=1000, tokens=80, passes=10)
    outcome = simulate([request], batching(), 1, POLICIES["prefix aware"])
    prefill = 3 * 0.01 + 0.0001 * 1064  # three steps of at most 512 tokens
    assert outcome.latencies == (pytest.approx(prefill + 10 * 0.011),)


def test_seats_share_a_step() -> None:
    """Eight that come together take as long as one step's growth says, not eight times as long."""
    together = [Request(n, 0.0, n, 0, 0, 10, 10) for n in range(8)]
    outcome = simulate(together, batching(seats=8), 1, POLICIES["round robin"])
    # The first to arrive starts a step alone; the others join the next one.
    assert max(outcome.latencies) == pytest.approx(0.011 + 9 * 0.018 + 0.017)
    one_seat = simulate(together, batching(seats=1), 1, POLICIES["round robin"])
    assert max(one_seat.latencies) == pytest.approx(80 * 0.011)


def test_the_cache_holds_whole_pages_and_forgets_the_longest_unused() -> None:
    def of(prefixes: list[int], cache_tokens: int) -> float:
        requests = [Request(n, 10.0 * n, p, 100, 28, 8, 1) for n, p in enumerate(prefixes)]
        engine = batching(cache_tokens=cache_tokens)
        return simulate(requests, engine, 1, POLICIES["round robin"]).hit_rate

    assert of([0, 0], 1000) == 96 / 256  # three pages of 32 of the second prompt
    assert of([0, 1, 0], 200) == 96 / 384
    assert of([0, 1, 0], 199) == 0
    assert of([0, 1, 0, 2, 0], 200) == 2 * 96 / 640  # 1 leaves for 2


def test_one_replica_leaves_nothing_to_choose() -> None:
    requests = drawn(200, 10.0)
    outcomes = {simulate(requests, batching(), 1, policy) for policy in POLICIES.values()}
    assert len(outcomes) == 1


def test_prefix_aware_hits_more() -> None:
    requests = drawn(600, 40.0, prefixes=100)
    rates = {
        name: simulate(requests, batching(), 8, policy).hit_rate
        for name, policy in POLICIES.items()
    }
    assert rates["prefix aware"] > 1.2 * rates["round robin"]
    assert rates["prefix aware"] > 1.2 * rates["least loaded"]


def test_prefix_aware_is_least_loaded_where_nothing_is_shared() -> None:
    requests = [replace(one, prefix=one.number) for one in drawn(300, 40.0)]
    aware, least = (
        simulate(requests, batching(), 4, POLICIES[name])
        for name in ("prefix aware", "least loaded")
    )
    assert aware == least


def test_prefix_aware_leaves_a_replica_that_is_too_busy() -> None:
    """All prompts begin alike; one replica alone would have them all."""
    requests = [Request(n, 0.0, 0, 64, 10, 10, 50) for n in range(60)]
    outcome = simulate(requests, batching(seats=4), 3, POLICIES["prefix aware"])
    counts = [sum(place == n for _, place in outcome.served) for n in range(3)]
    assert max(counts) - min(counts) <= 10


def test_least_loaded_avoids_the_queue_of_a_long_request() -> None:
    """Every third request is long, so that round robin sends all of them to one replica."""
    requests = [Request(n, 0.05 * n, n, 0, 0, 10, 60 if n % 3 == 0 else 1) for n in range(300)]
    turn, least = (
        simulate(requests, batching(seats=1), 3, POLICIES[name])
        for name in ("round robin", "least loaded")
    )
    assert quantile(least.latencies, 0.99) < quantile(turn.latencies, 0.99) / 1.5


@pytest.mark.parametrize("variation", [0.5, 1.094, 3.0])
def test_gaps_have_their_mean_and_variation(variation: float) -> None:
    gaps = gamma_gaps(Spread(0.2, variation), 100_000, random.Random(0))
    assert statistics.mean(gaps) == pytest.approx(0.2)
    assert statistics.pstdev(gaps) / 0.2 == pytest.approx(variation, rel=0.05)


def test_lengths_have_their_mean_and_variation() -> None:
    generator = random.Random(0)
    lengths = [log_normal(Spread(211.1, 0.771), generator) for _ in range(50_000)]
    assert statistics.mean(lengths) == pytest.approx(211.1, rel=0.03)
    assert statistics.pstdev(lengths) / 211.1 == pytest.approx(0.771, rel=0.05)
    assert min(lengths) >= 1


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0


@pytest.mark.parametrize("name", router.SERVED)
def test_the_steps_of_a_gpu_grow(name: str) -> None:
    engine = router.SERVED[name].engine(1024)
    times = [engine.step_seconds(n, 0, 0) for n in (1, 4, 16)]
    assert times == sorted(times) and times[0] > 0
    assert engine.step_seconds(1, 4096, 0) > engine.step_seconds(1, 0, 0)
    assert engine.cache_tokens > 0
    assert math.isfinite(router.capacity(engine, TRACES["code"], 3.08))


def test_the_script_writes_what_the_table_reads(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    words = ["--requests", "20", "--replicas", "1", "2", "--seeds", "4", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "router_simulation.py"), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(TABLES["router"].rows(json.loads(path.read_text())["results"]))
    assert rows[0] == ["model", "arrivals", "replicas", *POLICIES]
    assert len(rows) == 1 + 2 * 2 * 2 and " s; " in rows[1][3]
    assert rows[1][3] == rows[1][4] == rows[1][5]
