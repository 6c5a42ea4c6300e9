"""Fuzzing: thousands of hostile bodies to every endpoint of a real ``vllm serve``.

    .venv/bin/python benchmarks/fuzz.py
    .venv/bin/python benchmarks/fuzz.py --model gemma --bodies 1000 --json out.json

Each model gets a server with every endpoint open, also those for development.
The bodies hold each field's extremes, contradictions, random options and broken bytes, and many are
sent at a time. Requests whose answers are known are sent in between. The code is in
`tests/support/fuzz`.

A finding is one of these (`tests/support/fuzz/rules.py`); the exit status is 1 if there is any:

- an engine that dies; the body is searched for by asking alone what was under way,
- a status of 500, or a connection that breaks off, for a body that plain vLLM with an ordinary
  model answers otherwise; vLLM's own failures are listed with the line that raises,
- an answer that takes more than 40 s, asked again alone,
- a known answer that changes, requests or pages that are held afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402
from tests.support.fuzz.bodies import Body  # noqa: E402
from tests.support.fuzz.client import Reply, session  # noqa: E402
from tests.support.fuzz.rules import VLLMS_OWN, VLLMS_OWN_LATER, Site  # noqa: E402
from tests.support.fuzz.run import Fuzzer, Report, plain_server, traced  # noqa: E402
from tests.support.server import Server  # noqa: E402
from tests.support.soak.models import MODELS  # noqa: E402


def judge(fuzzer: Fuzzer, scratch: Path) -> None:
    """Send failed bodies to plain vLLM: a failure there too is vLLM's own, any other is ours."""
    if not fuzzer.failed:
        return
    with plain_server(scratch) as server:
        plain_replies = asyncio.run(_plainly(server, [reply.body for reply in fuzzer.failed]))
    for reply in fuzzer.failed:
        plain_reply, site = plain_replies[reply.body]
        raised = fuzzer.sites.get(reply)
        if raised and raised.key in VLLMS_OWN_LATER:
            site = raised
        elif not plain_reply.failed:
            problem = f"fails, where plain vLLM says {plain_reply.status}"
            fuzzer.find(problem, reply, raised)
            continue
        place = str(site or f"no traceback: {plain_reply.text[:100]}")
        count, example = fuzzer.report.own.get(place, (0, str(reply.body)))
        fuzzer.report.own[place] = (count + 1, example)
        if count == 0 and (site is None or site.key not in VLLMS_OWN | VLLMS_OWN_LATER):
            fuzzer.find(f"fails in plain vLLM too, and is not in VLLMS_OWN: {place}", reply)


async def _plainly(server: Server, bodies: Iterable[Body]) -> dict[Body, tuple[Reply, Site | None]]:
    """The replies of plain vLLM to each body alone; it is started again when a body kills it."""
    replies = {}
    async with session() as opened:
        for body in bodies:
            reply, _ = replies[body] = await traced(opened, server, body)
            if reply.failed and not _lives(server):
                server.stop()
                server.launch()
                server.wait_until_ready()
    return replies


def _lives(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def run(name: str, count: int, seed: int, scratch: Path) -> Report:
    """Fuzz one of `MODELS`."""
    fuzzer = Fuzzer(name, scratch)
    fuzzer.run(count, seed)
    judge(fuzzer, scratch)
    return fuzzer.report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--bodies", type=int, default=20_000, help="for each model")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    scratch = ROOT / ".cache" / "fuzz"
    scratch.mkdir(parents=True, exist_ok=True)
    reports = []
    for name in args.model:
        reports.append(run(name, args.bodies, args.seed, scratch))
        print("\n".join(reports[-1].lines()), flush=True)
    write(args.json, "fuzz", {report.model: report.figures() for report in reports})
    return 1 if any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
