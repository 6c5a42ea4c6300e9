"""What a lever brings in time: with it and without it in turns, in one engine.

    .venv/bin/python benchmarks/turns.py --json benchmarks/results/turns.json

A machine that is slow for a minute is so for both sides of a turn, so the median of the turns'
ratios says more than two runs would. `tiny-llada2` answers held-out problems, eager and in float32;
it stops if an answer differs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from benchmarks.llada2 import answers, prompts, served  # noqa: E402
from vllm_dllm.cpu import norms  # noqa: E402

Without = Callable[[Any], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def without_fused_commits(llm: Any) -> Iterator[None]:
    """Blocks are committed in passes of their own."""
    core = llm.llm_engine.engine_core.engine_core
    decoder = core.model_executor.driver_worker.worker.model_runner.sampler.decoder
    with mock.patch.object(decoder, "policy", replace(decoder.policy, fused=False)):
        yield


def without_compiled_norms(llm: Any) -> contextlib.AbstractContextManager[Any]:
    """Norms by elementwise operators, as vLLM's CPU platform has them."""
    return mock.patch.object(norms, "_takes", return_value=False)


LEVERS: dict[str, Without] = {
    "fused_commit": without_fused_commits,
    "norms in one pass": without_compiled_norms,
}


def gains(llm: Any, without: Without, asked: list[list[int]], at_once: int) -> Iterator[float]:
    """Of one turn after the other: seconds without the lever over seconds with it."""
    while True:
        begin = time.perf_counter()
        expected = answers(llm, asked, at_once)
        middle = time.perf_counter()
        with without(llm):
            found = answers(llm, asked, at_once)
        end = time.perf_counter()
        if found != expected:
            raise RuntimeError("other answers without the lever; the figures would mean nothing")
        yield (end - middle) / (middle - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--per-task", type=int, default=8, help="problems of each task")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm, asked = served(enforce_eager=True), prompts(args.per_task)
    answers(llm, asked, 16)  # warm up
    results: dict[str, dict[str, list[float]]] = {}
    for name, without in LEVERS.items():
        for at_once in args.at_once:
            turns = gains(llm, without, asked, at_once)
            found = [next(turns) for _ in range(args.turns)]
            results.setdefault(name, {})[str(at_once)] = found
            print(
                f"{name:20}{at_once:4} at a time: {statistics.median(found):.2f} x "
                f"({min(found):.2f} to {max(found):.2f})",
                flush=True,
            )
    write(args.json, "turns", results)


if __name__ == "__main__":
    main()
