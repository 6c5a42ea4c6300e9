"""Fuzzing: thousands of hostile bodies to a real ``vllm serve``.

    .venv/bin/python benchmarks/fuzz.py
    .venv/bin/python benchmarks/fuzz.py --model gemma --bodies 1000 --json out.json

The bodies hold each field's extremes, contradictions, random options and broken bytes, and many are
sent at a time to every endpoint whose requests come to the model. Requests whose answers are known
are sent in between. The code is in `tests/support/fuzz`.

A finding is one of these; the exit status is 1 if there is any:

- an engine that dies, with the bodies that were under way,
- a status of 500, or a connection that breaks off; vLLM's own failures (`VLLMS_OWN`) are listed
  with the line that raises, and a new one belongs there if plain vLLM with an ordinary model fails
  for the body, too,
- an answer that takes more than 40 s, asked again alone,
- a known answer that changes, requests or pages that are held afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402
from tests.support.fuzz.bodies import plan  # noqa: E402
from tests.support.fuzz.endpoints import endpoints  # noqa: E402
from tests.support.fuzz.run import Fuzzer  # noqa: E402
from tests.support.soak.models import MODELS  # noqa: E402


def run(name: str, count: int, seed: int, scratch: Path) -> Fuzzer:
    """Fuzz one of `MODELS`."""
    fuzzer = Fuzzer(name, scratch)
    with fuzzer.server:
        document = httpx.get(f"{fuzzer.server.url}/openapi.json", timeout=30).json()
        asyncio.run(fuzzer.storm(plan(endpoints(document, fuzzer.corruption), count, seed)))
    return fuzzer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--bodies", type=int, default=20_000, help="for each model")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    scratch = ROOT / ".cache" / "fuzz"
    scratch.mkdir(parents=True, exist_ok=True)
    runs = []
    for name in args.model:
        runs.append(run(name, args.bodies, args.seed, scratch))
        print(name, json.dumps(runs[-1].figures(), indent=1), flush=True)
    write(args.json, "fuzz", {one.name: one.figures() for one in runs})
    return 1 if any(one.findings for one in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
