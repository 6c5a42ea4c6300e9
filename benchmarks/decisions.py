"""Decisions a second: typed questions answered from one pass, and other ways to ask the same.

    .venv/bin/python benchmarks/decisions.py --json benchmarks/results/decisions.json
    .venv/bin/python benchmarks/decisions.py --eager --systems gemma gemma-native

Each system is a real server on loopback. All are up at the same time and take turns, so that a slow
minute of the machine slows all of them; figures are medians of the turns. The systems are:

    sdar            this package, tiny-sdar
    sdar-choice     the same server, asked for labels by chats with a constraint
    sdar-causal     the same weights decoded token by token, read by vLLM's own strategy
    gemma           this package, tiny-diffusiongemma
    gemma-choice    the same server, asked for labels by chats with a constraint
    gemma-native    vLLM's own class for the same

At 8 at a time a request has 8 questions about one state, or as many chats are in flight about it.
No prompt is asked for twice, or the prefix cache would answer for one of two systems. States have
up to 9 words. The checkpoints know no answers; their tokenizers get tokens for "yes" and "no",
which decisions need.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write  # noqa: E402
from benchmarks.serve import System, server_of, start  # noqa: E402
from tests.support.checkpoints import TEXT_ONLY_FLAGS, TINY_GEMMA, TINY_SDAR  # noqa: E402
from tests.support.decisions import (  # noqa: E402
    CHANNEL,
    LABELS,
    asked,
    decide,
    questions_about,
    text,
    with_tokens,
)
from tests.support.server import Server  # noqa: E402

AS_CAUSAL = '{"architectures": ["Qwen3ForCausalLM"], "canvas_length": null}'
NATIVE = {"VLLM_DLLM_NATIVE": "1"}
CHOICE = "-choice"
SYSTEMS = {
    "sdar": System(TINY_SDAR),
    f"sdar{CHOICE}": System(TINY_SDAR),
    "sdar-causal": System(TINY_SDAR, ("--hf-overrides", AS_CAUSAL)),
    "gemma": System(TINY_GEMMA, TEXT_ONLY_FLAGS),
    f"gemma{CHOICE}": System(TINY_GEMMA, TEXT_ONLY_FLAGS),
    "gemma-native": System(TINY_GEMMA, TEXT_ONLY_FLAGS, NATIVE),
}


def by_decisions(server: Server, every: list[dict[str, Any]], _: int) -> None:
    """Ask all questions about a state in one request, a state after the other."""
    for one in every:
        decide(server, one)


def by_choices(server: Server, every: list[dict[str, Any]], at_once: int) -> None:
    """Ask each question in a chat of its own, which may only answer with a label."""

    def ask(name: str, one: dict[str, Any]) -> None:
        spec = asked(name, one["questions"][name])
        answer = server.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": f"{one['state']}\n\n{spec.type.prompt(spec)}"}],
            max_tokens=2,  # the label, and the end that every constrained answer has
            temperature=0,
            structured_outputs={"choice": list(spec.labels)},
        )
        answer.raise_for_status()

    with ThreadPoolExecutor(at_once) as clients:
        asks = [clients.submit(ask, name, one) for one in every for name in one["questions"]]
        for done in asks:
            done.result()


def rate(server: Server, ask: Callable[..., None], at_once: int, least: int, seed: str) -> float:
    """Answers a second to questions, so many at a time; `seed` is not used twice."""
    chance = random.Random(seed)
    count = -(-least // at_once)
    every = [questions_about(text(chance, 9), at_once, chance) for _ in range(count)]
    begin = time.monotonic()
    ask(server, every, at_once)
    return len(every) * at_once / (time.monotonic() - begin)


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Answers a second of each system, by how many are asked at a time."""
    servers, results = {}, {name: dict[str, Any]() for name in args.systems}
    for name in dict.fromkeys(name.removesuffix(CHOICE) for name in args.systems):
        model = scratch / name
        shutil.copytree(SYSTEMS[name].model, model)
        with_tokens(model, LABELS | (CHANNEL if name.startswith("gemma") else {}))
        system = replace(SYSTEMS[name], model=model)
        servers[name] = server_of(system, scratch / f"{name}.log", args.eager)
    with ExitStack() as stack:
        start(list(servers.values()), stack)
        for at_once in args.at_once:
            turns: dict[str, list[float]] = {name: [] for name in args.systems}
            for turn in range(args.turns + 1):  # the first one warms up
                for name in args.systems:
                    ask = by_choices if name.endswith(CHOICE) else by_decisions
                    server = servers[name.removesuffix(CHOICE)]
                    least, seed = max(args.least, 2 * at_once), f"{name} {at_once} {turn}"
                    turns[name].append(rate(server, ask, at_once, least, seed))
                    print(f"{name}: {turns[name][-1]:.0f} a second at {at_once}", file=sys.stderr)
            for name, found in turns.items():
                figures = {"decisions_per_second": median(found[1:]), "turns": found[1:]}
                results[name][str(at_once)] = figures
    return results


def show(results: dict[str, Any]) -> None:
    """Print the medians, and how many times as many this package answers with the same model."""
    for name, found in results.items():
        own = results.get(name.partition("-")[0], found)
        cells = []
        for at, figures in found.items():
            rate = figures["decisions_per_second"]
            ratio = own[at]["decisions_per_second"] / rate
            cells.append(f"{rate:8.1f} (x {ratio:.2f}) @{at}")
        print(f"{name:14}", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--least", type=int, default=60, help="questions of a run, at least")
    parser.add_argument("--turns", type=int, default=5, help="runs of each system")
    parser.add_argument("--eager", action="store_true", help="nothing compiled, for quick starts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results = measure(args, Path(name))
    show(results)
    write(args.json, "decisions", results)


if __name__ == "__main__":
    main()
