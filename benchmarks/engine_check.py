"""The simulation of one replica against the real engine: `router_simulation.py --check`.

`tiny-llada2` runs in this process on a CPU, in rounds. Each round times its steps with 1 to 16
requests, and its prefills; draws requests; gives them to the engine when they are due; times the
steps again; and simulates one replica that has the mean of both times, with the same requests at
the same moments. Times before and after the run are taken because a machine that others use is not
equally fast from minute to minute. Each answer takes a pass for each token, because no position is
ever sure enough (`diffusion_threshold`), so that the number of passes is known. The times are of
this loop's `step()`, which includes what `benchmarks/step_time.py` leaves out: taking requests in,
and handing answers out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

from benchmarks.arrivals import Request, Spread, gamma_gaps
from benchmarks.common import engines_in_this_process, write
from benchmarks.measured_times import Times, line, middle
from benchmarks.replicas import Engine, Outcome, round_robin, simulate
from benchmarks.router_tables import router_check, router_steps
from benchmarks.tables import markdown

SEATS = 16
SIZES = (1, 2, 4, 8, 16)
REPEATS = 2  # of each size, with beginnings that are new and then with the same ones
# Tokens: of the part of a prompt that others have too, of the rest, of the answer. Blocks have 32
# and vLLM's pages on a CPU 128.
SHARED, OWN, OUTPUT = 256, 32, 32
PREFIXES = 8
VARIATION = 1.094  # of the gaps, as in the conversations of the trace
# The share of the most requests a second; more would make latencies hang on single steps.
LOAD = 0.6
FIGURES = ("p50_ms", "p99_ms", "mean_ms", "tokens_per_s", "hit_rate")


class Clock:
    """Seconds on the wall, or of the processor in this process.

    On a machine that others use, a step's time on the wall says more about them than about the
    step. The processor's time leaves them out; waiting for the next arrival is then skipped.
    """

    def __init__(self, kind: str) -> None:
        self.read = {"wall": time.perf_counter, "cpu": time.process_time}[kind]
        self.kind, self.skipped = kind, 0.0

    def now(self) -> float:
        """Seconds since some moment."""
        return self.read() + self.skipped

    def wait(self, seconds: float) -> None:
        """Sleep, or let so much time have passed."""
        if self.kind == "wall":
            time.sleep(seconds)
        else:
            self.skipped += seconds


class Clocked:
    """The engine, its requests, and the seconds of each step."""

    def __init__(self, llm: Any, clock: Clock) -> None:
        from vllm import SamplingParams

        self.clock = clock
        self.engine = llm.llm_engine
        self.params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT,
            ignore_eos=True,
            extra_args={"diffusion_threshold": 2.0},
        )
        self.names = 0

    def add(self, prompt: list[int]) -> str:
        """Send a prompt; the name under which its answer comes."""
        self.names += 1
        self.engine.add_request(f"{self.names}", {"prompt_token_ids": prompt}, self.params)
        return f"{self.names}"

    def step(self) -> tuple[float, list[Any]]:
        """A step's seconds, and the answers that ended with it."""
        begin = self.clock.now()
        outputs = self.engine.step()
        return self.clock.now() - begin, [one for one in outputs if one.finished]

    def batch(self, prompts: list[list[int]]) -> list[float]:
        """The seconds of all steps that so many prompts take, which begin together."""
        begin = self.clock.now()
        for prompt in prompts:
            self.add(prompt)
        adding = self.clock.now() - begin
        seconds = []
        while self.engine.has_unfinished_requests():
            seconds.append(self.step()[0])
        seconds[0] += adding
        return seconds


def prompt_of(prefix: int, number: int, shared: int = SHARED, own: int = OWN) -> list[int]:
    """A prompt of ids; those with the same prefix begin alike, and no two are equal."""
    beginning, rest = random.Random(f"shared {prefix}"), random.Random(f"own {number}")
    return [
        *(beginning.randrange(3, 200) for _ in range(shared)),
        *(rest.randrange(3, 200) for _ in range(own)),
    ]


FRESH = itertools.count(1_000_000)  # numbers that no other prompt has


def calibrate(engine: Clocked) -> Times:
    """Time the steps of 1 to 16 requests.

    Half of the batches have prompts that nobody has sent before, and the others beginnings that are
    in the cache: their first steps tell the cost of a request from that of its tokens.
    """
    denoise, passes = {}, 0
    fresh, known = list[tuple[float, float]](), list[tuple[float, float]]()
    for size in SIZES:
        means = []
        for _ in range(REPEATS):
            beginnings = [next(FRESH) for _ in range(size)]
            for firsts in (fresh, known):
                seconds = engine.batch([prompt_of(one, next(FRESH)) for one in beginnings])
                firsts.append((size, seconds[0]))
                means.append(mean(seconds[1:]))
                passes = len(seconds) - 1 if size == 1 else passes
        denoise[size] = mean(means)
    (one, all_tokens), (other, own_tokens) = line(fresh), line(known)
    token = max(0.0, (all_tokens - own_tokens) / SHARED)
    first = max(0.0, (one + other) / 2)
    return Times(denoise, first, token, max(0.0, own_tokens - OWN * token), passes)


def drawn(count: int, rate: float, passes: int, seed: int) -> list[Request]:
    """Requests whose prefixes are equally frequent."""
    generator = random.Random(seed)
    gaps = gamma_gaps(Spread(1 / rate, VARIATION), count, generator)
    requests, now = [], 0.0
    for number, gap in enumerate(gaps):
        now += gap
        prefix = generator.randrange(PREFIXES)
        requests.append(Request(number, now, prefix, SHARED, OWN, OUTPUT, passes))
    return requests


def real(engine: Clocked, requests: Sequence[Request]) -> Outcome:
    """Give the requests to the engine when they are due."""
    coming, names = list(reversed(requests)), dict[str, Request]()
    latencies: dict[int, float] = {}
    tokens = cached = 0
    busy = 0.0
    clock = engine.clock
    begin = clock.now()
    while coming or names:
        now = clock.now() - begin
        while coming and coming[-1].arrival <= now:
            request = coming.pop()
            name = engine.add(prompt_of(request.prefix, request.number))
            names[name] = request
        if not names:
            clock.wait(max(0.0, coming[-1].arrival - now))
            continue
        seconds, finished = engine.step()
        busy += seconds
        for output in finished:
            request = names.pop(output.request_id.split("-")[0])
            latencies[request.number] = clock.now() - begin - request.arrival
            tokens += len(output.outputs[0].token_ids)
            cached += output.num_cached_tokens or 0
    seconds = clock.now() - begin - requests[0].arrival
    return Outcome(
        served=tuple((number, 0) for number in latencies),
        latencies=tuple(latencies[request.number] for request in requests),
        seconds=seconds,
        tokens=tokens,
        hit_rate=cached / sum(one.shared + one.own for one in requests),
        busy=busy / seconds,
    )


@contextmanager
def engine_of_page(clock: Clock) -> Iterator[tuple[Clocked, int]]:
    """The engine, and the tokens of a page of its cache."""
    engines_in_this_process()
    from vllm import LLM

    from tests.support.checkpoints import TINY_LLADA2

    llm = LLM(
        model=str(TINY_LLADA2),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=1024,
        max_num_seqs=SEATS,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
    )
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    yield Clocked(llm, clock), max(group.kv_cache_spec.block_size for group in groups)
    llm.llm_engine.engine_core.shutdown()


def one_round(engine: Clocked, page: int, count: int, seed: int) -> dict[str, Any]:
    """Time the steps, run the requests, time the steps again, and simulate the same requests."""
    before = calibrate(engine)
    most = SEATS / (before.passes * before.denoise[SEATS])
    requests = drawn(count, LOAD * most, before.passes, seed)
    engine.engine.reset_prefix_cache()
    found = real(engine, requests)
    after = calibrate(engine)
    replica = Engine(middle(before, after).step_seconds, SEATS, page=page)
    expected = simulate(requests, replica, 1, round_robin)
    return {
        "requests": count,
        "requests_per_s": LOAD * most,
        "calibration": before.figures(),
        "calibration_after": after.figures(),
        "simulated": expected.figures(),
        "real": found.figures(),
    }


def deviation(rounds: Sequence[dict[str, Any]], key: str) -> float:
    """Simulated over real less one, of the medians over all rounds."""
    pair = [median(one[side][key] for one in rounds) for side in ("simulated", "real")]
    if not pair[1]:
        return math.inf if pair[0] else 0.0
    return pair[0] / pair[1] - 1


def check(args: argparse.Namespace) -> int:
    """Run all rounds; 1 if a figure deviates by more than the limit."""
    rounds: list[dict[str, Any]] = []
    with engine_of_page(Clock(args.clock)) as (engine, page):
        calibrate(engine)  # warms up
        for number in range(args.rounds):
            # A cold cache in each round, and other requests.
            rounds.append(one_round(engine, page, args.requests, args.seeds[0] + number))
            print(f"round {number + 1} of {args.rounds} is done", file=sys.stderr, flush=True)
            deviations = {key: deviation(rounds, key) for key in FIGURES}
            results = {
                "clock": args.clock,
                "page": page,
                "limit": args.limit / 100,
                "rounds": rounds,
                "deviation": deviations,
            }
            write(args.json, "router_check", results)
    for rows in (router_steps(results), router_check(results)):
        print(*markdown(rows), "", sep="\n")
    for key, value in deviations.items():
        print(f"{key:14} simulated over real {100 * value:+.1f} %")
    return int(any(abs(value) > results["limit"] for value in deviations.values()))
