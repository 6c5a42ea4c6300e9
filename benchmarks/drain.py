"""What clients see of a server that is asked to end while it works, and how long it takes.

    .venv/bin/python benchmarks/drain.py --json benchmarks/results/drain.json

A real ``vllm serve`` gets more requests than it has seats, every other one streamed. When all have
reached the engine the server gets SIGTERM, as a container gets it from its supervisor. From then on
`/health` and a new request are asked again and again, as a prober and a late client would do it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402
from tests.support.server import AS_SERVED, Server  # noqa: E402

MODEL = ROOT / "examples" / "tiny" / "checkpoints" / "tiny-llada2"
# One token a step, so that a request lasts.
SLOW = {"diffusion_threshold": 2.0}
IN_THE_ENGINE = ("num_requests_running", "num_requests_waiting", "request_success_total")
EVERY_S = 0.05


def client(url: str, number: int, tokens: int) -> dict[str, Any]:
    """Send one request; what came back, and when the last of it came."""
    streamed = number % 2 == 0
    body = {"model": "m", "prompt": f"sort 6{number} 35", "max_tokens": tokens, "stream": streamed}
    body |= {"ignore_eos": True, "temperature": 0, "vllm_xargs": SLOW}
    outcome, reason = "", None
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            outcome = str(answer.status_code)
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith('{"error"'):
                    outcome = str(json.loads(data)["error"]["code"])
                elif data.startswith("{"):
                    reason = json.loads(data)["choices"][0]["finish_reason"] or reason
    except httpx.TransportError as error:
        outcome = type(error).__name__
    return {"streamed": streamed, "outcome": outcome, "reason": reason, "at": time.monotonic()}


def watch(url: str, path: str, body: dict[str, Any] | None, ended: threading.Event) -> list[Any]:
    """(time, outcome) whenever the outcome of the same question changes."""
    seen: list[Any] = []
    while not ended.wait(EVERY_S):
        at = time.monotonic()
        try:
            ask = httpx.post if body else httpx.get
            outcome = str(ask(f"{url}{path}", **({"json": body} if body else {})).status_code)
        except httpx.TransportError as error:
            outcome = type(error).__name__
        if not seen or seen[-1][1] != outcome:
            seen.append((at, outcome))
    return seen


def taken(server: Server) -> float:
    """How many requests have reached the engine."""
    return sum(server.metric(f"vllm:{name}") for name in IN_THE_ENGINE)


def drain(server: Server, requests: int, tokens: int) -> dict[str, Any]:
    """Load the server, send it SIGTERM, and wait for it and for all clients."""
    new = {"model": "m", "prompt": "64 + 28", "max_tokens": 4}
    ended, before = threading.Event(), taken(server)
    with ThreadPoolExecutor(requests + 2) as pool:
        clients = [pool.submit(client, server.url, n, tokens) for n in range(requests)]
        while taken(server) - before < requests:
            time.sleep(0.02)
        running, waiting = (server.metric(f"vllm:{name}") for name in IN_THE_ENGINE[:2])
        sent = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        watched = {
            "/health": pool.submit(watch, server.url, "/health", None, ended),
            "new request": pool.submit(watch, server.url, "/v1/completions", new, ended),
        }
        status = server.process.wait(300)
        over = time.monotonic()
        ended.set()
        answers = [future.result() for future in clients]
    outcomes = Counter(" ".join(filter(None, (a["outcome"], a["reason"]))) for a in answers)
    after = sorted(answer["at"] - sent for answer in answers)
    return {
        "running_at_signal": int(running),
        "waiting_at_signal": int(waiting),
        "clients": dict(outcomes),
        "first_answer_s": after[0],
        "last_answer_s": after[-1],
        "server_gone_s": over - sent,
        "exit_status": status,
        "changes": {
            name: [[at - sent, outcome] for at, outcome in future.result()]
            for name, future in watched.items()
        },
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"SIGTERM with {found['running_at_signal']} requests running and "
        f"{found['waiting_at_signal']} waiting: clients saw {found['clients']}; first and last "
        f"answer {found['first_answer_s']:.1f} and {found['last_answer_s']:.1f} s after it, the "
        f"server gone after {found['server_gone_s']:.1f} s with exit status {found['exit_status']}"
    )
    for name, changes in found["changes"].items():
        print(f"  {name}: " + ", ".join(f"{what} from {at:.2f} s" for at, what in changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--seats", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--tokens", type=int, default=1200, help="of each request")
    parser.add_argument("--shutdown-timeout", type=int, metavar="S", help="the server's flag")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    flags = ["--max-num-seqs", str(args.seats), "--max-model-len", "2048"]
    if args.shutdown_timeout is not None:
        flags += ["--shutdown-timeout", str(args.shutdown_timeout)]
    with tempfile.TemporaryDirectory(prefix="vllm-dllm-drain-") as folder:
        log = Path(folder) / "log"
        with Server(MODEL, *flags, log=log, env=AS_SERVED, start_seconds=300) as server:
            found = drain(server, args.requests, args.tokens)
    show(found)
    write(args.json, "drain", found)


if __name__ == "__main__":
    main()
