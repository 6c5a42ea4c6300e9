"""A soak: thousands of mixed requests to a real ``vllm serve``, and what must hold afterwards.

    .venv/bin/python benchmarks/soak.py
    .venv/bin/python benchmarks/soak.py --model gemma --requests 20000 --json out.json
    .venv/bin/python benchmarks/soak.py --model llada2 -- --async-scheduling

The requests use every decoding algorithm, greedy and sampled, streamed and whole; some have tools,
stop strings, priorities, several choices or an adapter. 64 run at a time
for 40 seats and too few KV pages. One request in ten is left by its client, and one in twenty is
malformed. Now and then the engine stands still for seconds. The code is in `tests/support/soak`.

Afterwards (`benchmarks/soak_rules.py`): every answer is that of the same request alone, nothing
is held, all seats are free, memory is flat, and the log has no error. If not, the exit status is 1.

Prefix caching is on under load; before each request that is asked alone the cache is emptied, so
that answers from shared pages are compared with answers that had to be computed whole.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import Progress, write  # noqa: E402
from benchmarks.soak_rules import (  # noqa: E402
    FROZEN,
    Faults,
    Growth,
    Sample,
    different,
    growth,
    log_errors,
    resident_bytes,
    unexpected,
)
from tests.support.server import Server  # noqa: E402
from tests.support.soak.client import (  # noqa: E402
    ANSWER_SECONDS,
    COMPLETED,
    MOST_FAILURES,
    REFUSED,
    Answer,
    Client,
    Outcome,
    send_all,
    session,
)
from tests.support.soak.models import (  # noqa: E402
    ENVIRONMENT,
    MEGABYTE,
    MODELS,
    SEATS,
    Model,
    chosen,
)
from tests.support.soak.requests import Ask, Sending, draw_plan, draw_pool  # noqa: E402

PREEMPTIONS = "vllm:num_preemptions_total"
SAMPLES = 100  # of memory, in a run
IDLE_SECONDS = 60.0
SEAT_TRIES = 3
LEAST_REQUESTS = 250  # fewer say nothing of memory
MOST_SHOWN = 20  # complaints; the figures have all of them


@dataclass(frozen=True)
class Size:
    """The size of a soak.

    Attributes:
        requests: how many are sent.
        distinct: how many of them differ.
        concurrency: how many run at a time.
        seed: of the mix.
        patience: seconds; a request that is not answered by then hangs.
    """

    requests: int = 500
    distinct: int = 150
    concurrency: int = 64
    seed: int = 0
    patience: float = ANSWER_SECONDS


@dataclass(frozen=True)
class Report:
    """The measurements of a soak, and the problems that it found.

    Attributes:
        counts: requests by `Outcome.status`.
        seconds: of the load, without what is asked afterwards.
        preemptions: requests that gave their pages back to others and began again.
        faults: what was done beside the requests, by kind.
        alone: distinct requests that were asked once more.
        memory: of the server's processes; None when the run was cut short.
        wrong: what was wrong, a line each.
    """

    counts: Mapping[str, int]
    seconds: float
    preemptions: int
    faults: Mapping[str, int]
    alone: int
    memory: Growth | None
    wrong: Sequence[str]

    def lines(self) -> list[str]:
        """The report as text for people."""
        total = sum(self.counts.values())
        counted = ", ".join(f"{count} {status}" for status, count in sorted(self.counts.items()))
        lines = [
            f"{counted}; {self.preemptions} preemptions",
            ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())),
            f"{total / self.seconds:.1f} requests/s for {self.seconds:.0f} s; "
            f"{self.alone} distinct requests asked again, alone",
        ]
        if memory := self.memory:
            sizes = (memory.start, memory.warm, memory.end, memory.limit)
            start, warm, end, limit = (size / MEGABYTE for size in sizes)
            lines.append(
                f"memory: {start:.1f} MB at first, {warm:.1f} MB warm, {end:.1f} MB at the end "
                f"({end - warm:+.1f} MB; the limit is {limit:.1f} MB)"
            )
        if not self.wrong:
            return [*lines, "all right"]
        return [*lines, *self.wrong[:MOST_SHOWN], f"{len(self.wrong)} complaints"]


def run(model: Model, size: Size, log: Path, flags: Sequence[str] = ()) -> Report:
    """Start a server, soak it, and say what was found; `flags` go to ``vllm serve``, too."""
    with Server(model.path, *model.command(log.parent), *flags, log=log, env=ENVIRONMENT) as server:
        report = asyncio.run(soak(server, model, size))
        # Before the end: vLLM, when it is stopped, may log the death of its own engine core.
        wrong = log_errors(log.read_text(errors="replace"), report.counts.get(REFUSED, 0))
    return Report(**{**vars(report), "wrong": [*report.wrong, *wrong]})


async def soak(server: Server, model: Model, size: Size) -> Report:
    """Run the load, then every check but that of the log."""
    pool = draw_pool(size.distinct, model.corruption, size.seed, model.adapters)
    sendings = draw_plan(size.requests, pool, size.seed)
    alone: dict[str, Answer] = {}
    memory, preemptions = None, 0
    async with session() as opened:
        client = Client(server.url, opened, answer_seconds=size.patience)
        begin = time.monotonic()
        faults = Faults(server.process.pid, size.seed)
        outcomes, samples = await load(server, client, sendings, size.concurrency, faults)
        seconds = time.monotonic() - begin
        wrong = faults.wrong + unexpected(outcomes)
        if len(outcomes) < len(sendings):
            wrong.append(f"given up after {len(outcomes)} of {len(sendings)} requests")
        else:
            memory = growth(samples)
            wrong += memory.complaints()
        try:
            preemptions = int(server.metric(PREEMPTIONS))
            server.wait_until_idle(IDLE_SECONDS)
            wrong += await seats_are_back(server, client, model)
            alone, failed = await ask_alone(server, client, completed(outcomes))
            wrong += failed + different(outcomes, alone)
        except AssertionError as error:
            wrong.append(f"not idle after {IDLE_SECONDS:.0f} s: {error}")
        except httpx.HTTPError as error:
            wrong.append(f"the server does not answer: {error!r}")
    counts = Counter(outcome.status for outcome in outcomes)
    made = {FROZEN: faults.made}
    return Report(dict(counts), seconds, preemptions, made, len(alone), memory, wrong)


async def load(
    server: Server, client: Client, sendings: Sequence[Sending], concurrency: int, faults: Faults
) -> tuple[list[Outcome], list[Sample]]:
    """Send the requests, cause faults beside them, and watch the server's memory meanwhile."""
    samples = [Sample(0, resident_bytes(server.process.pid))]
    progress, every = Progress("load", len(sendings)), max(1, len(sendings) // SAMPLES)

    def finished(outcome: Outcome) -> None:
        progress.step()
        faults.request_ended()
        if progress.done % every == 0:
            samples.append(Sample(progress.done, resident_bytes(server.process.pid)))

    outcomes = await send_all(client, sendings, concurrency, finished)
    await faults.end()
    return outcomes, samples


def completed(outcomes: Sequence[Outcome]) -> list[Ask]:
    """The distinct requests that were answered."""
    asks = {o.sending.ask.name: o.sending.ask for o in outcomes if o.status == COMPLETED}
    return list(asks.values())


async def seats_are_back(server: Server, client: Client, model: Model) -> list[str]:
    """Check that as many slow requests as there are seats run at the same time.

    Each is of one canvas, so that none waits for pages. The first request may end before the last
    one has arrived, so there are several tries; a lost seat stays lost in all of them.
    """
    body = {"prompt": "seats", "max_tokens": 27, "ignore_eos": True, "temperature": 0, "seed": 1}
    ask = Ask("seat", "/v1/completions", body | {"vllm_xargs": model.slow()})
    sendings = [Sending(number, ask, stream=False) for number in range(SEATS)]
    most = 0
    for _ in range(SEAT_TRIES):
        sent = asyncio.create_task(send_all(client, sendings, SEATS))
        while not sent.done():
            running = await asyncio.to_thread(server.metric, "vllm:num_requests_running")
            most = max(most, int(running))
        if (wrong := unexpected(await sent)) or most >= SEATS:
            return wrong
    return [f"only {most} of {SEATS} seats were taken at a time: the others are lost"]


async def ask_alone(
    server: Server, client: Client, asks: Sequence[Ask]
) -> tuple[dict[str, Answer], list[str]]:
    """Send each request by itself, not streamed, to a server with an empty prefix cache."""
    outcomes: list[Outcome] = []
    progress = Progress("alone", len(asks))
    for number, ask in enumerate(asks):
        if not emptied(server):
            return {}, [f"the prefix cache cannot be emptied before {ask.name}: pages are held"]
        outcomes.append(await client.send(Sending(number, ask, stream=False)))
        progress.step()
        if len(failed := unexpected(outcomes)) >= MOST_FAILURES:
            return {}, failed
    answers = {o.sending.ask.name: o.answer for o in outcomes if o.answer is not None}
    return answers, unexpected(outcomes)


def emptied(server: Server) -> bool:
    """Forget the prefix cache; refused while a request holds pages, so wait for the last one."""
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        answer = httpx.post(f"{server.url}/reset_prefix_cache", timeout=IDLE_SECONDS)
        if answer.json()["success"]:
            return True
        time.sleep(0.05)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model",
        nargs="+",
        default=list(MODELS),
        help=f"{', '.join(MODELS)}, or a path",
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--distinct", type=int, help="default: 3 in 10, at most 300")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the mix")
    parser.add_argument(
        "--patience",
        type=float,
        default=ANSWER_SECONDS,
        help="seconds, after which a request hangs; more on a busy machine",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("flags", nargs="*", help="after --: more flags of vllm serve")
    args = parser.parse_args()
    if args.requests < LEAST_REQUESTS:
        parser.error(f"--requests must be at least {LEAST_REQUESTS}")
    distinct = args.distinct or max(1, min(300, args.requests * 3 // 10))
    size = Size(args.requests, distinct, args.concurrency, args.seed, args.patience)
    reports = {}
    for model in args.model:
        name = Path(model).name
        log = ROOT / ".cache" / f"soak-{name}.log"
        log.parent.mkdir(exist_ok=True)
        print(f"{name}: {size.requests} requests, {distinct} distinct", flush=True)
        reports[name] = run(chosen(model), size, log, args.flags)
        print("\n".join(reports[name].lines()), flush=True)
    figures = {name: asdict(report) for name, report in reports.items()}
    write(args.json, "soak", {"size": asdict(size)} | figures)
    return 1 if any(report.wrong for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
