"""The time that each lever saves: one engine runs with it and without it in turns.

    .venv/bin/python benchmarks/turns.py --json benchmarks/results/turns.json

A slow minute of the machine slows both sides of a turn, so the median of the turns' ratios says
more than two runs would. The tiny checkpoints answer held-out problems in float32, and each engine
has a process of its own. The benchmark stops if an answer differs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import child, engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported


from benchmarks.llada2 import answers, prompts, served  # noqa: E402
from tests.support.checkpoints import TINY_GEMMA, TINY_LLADA2  # noqa: E402
from vllm_dllm.cpu import norms  # noqa: E402
from vllm_dllm.ops.noise.keyed import candidate_keys, step_noise  # noqa: E402
from vllm_dllm.ops.statistics.rows import row_statistics  # noqa: E402
from vllm_dllm.ops.statistics.sampled import draw  # noqa: E402
from vllm_dllm.ops.statistics.tiled import tiled_statistics  # noqa: E402

Without = Callable[[Any], contextlib.AbstractContextManager[Any]]


def sampler_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.sampler


@contextlib.contextmanager
def without_fused_commits(llm: Any) -> Iterator[None]:
    """Commit blocks in passes of their own."""
    decoder = sampler_of(llm).canvas_update
    with mock.patch.object(decoder, "policy", replace(decoder.policy, fused=False)):
        yield


def without_compiled_norms(llm: Any) -> contextlib.AbstractContextManager[Any]:
    """Compute norms by elementwise operators, as vLLM's CPU platform does."""
    return mock.patch.object(norms, "_takes", return_value=False)


def with_plain_functions(**functions: Any) -> Without:
    """Compute row statistics and noise by PyTorch's operators."""
    return lambda llm: mock.patch.multiple(sampler_of(llm).readout, **functions)


def llada2(**options: Any) -> Any:
    return served(TINY_LLADA2, **options)


def gemma() -> Any:
    text = {"image": 0, "video": 0}
    return served(TINY_GEMMA, additional_config={}, limit_mm_per_prompt=text)


@dataclass(frozen=True)
class Ride:
    """An engine, what it is asked, and its levers.

    Attributes:
        start: starts the engine.
        levers: names to what takes a lever away.
        temperature: of the requests; None for the model's own.
    """

    start: Callable[[], Any]
    levers: Mapping[str, Without]
    temperature: float | None = None


PLAIN_LLADA2 = with_plain_functions(statistics=row_statistics, keys=candidate_keys, draw=draw)
PLAIN_GEMMA = with_plain_functions(statistics=tiled_statistics, noise=step_noise)
RIDES = {
    "llada2, eager": Ride(
        partial(llada2, enforce_eager=True),
        {
            "fused_commit": without_fused_commits,
            "norms in one pass": without_compiled_norms,
        },
    ),
    "llada2, greedy": Ride(llada2, {"compiled sampler, LLaDA2 greedy": PLAIN_LLADA2}),
    "llada2, drawn": Ride(llada2, {"compiled sampler, LLaDA2 drawn": PLAIN_LLADA2}, 1.0),
    "gemma": Ride(gemma, {"compiled sampler, DiffusionGemma": PLAIN_GEMMA}),
}


def gains(llm: Any, without: Without, answered: Callable[[], Any]) -> Iterator[float]:
    """For one turn after the other: seconds without the lever over seconds with it."""
    while True:
        begin = time.perf_counter()
        expected = answered()
        middle = time.perf_counter()
        with without(llm):
            actual = answered()
        end = time.perf_counter()
        if actual != expected:
            raise RuntimeError("other answers without the lever; the figures would mean nothing")
        yield (end - middle) / (middle - begin)


def measured(ride: Ride, at_once: int, per_task: int, turns: int) -> dict[str, list[float]]:
    """The ratios of the turns, by lever."""
    llm = ride.start()
    questions = prompts(per_task, llm.get_tokenizer())
    answered = partial(answers, llm, questions, at_once, ride.temperature)
    answered()  # warm up
    return {
        name: list(itertools.islice(gains(llm, without, answered), turns))
        for name, without in ride.levers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--per-task", type=int, default=8, help="problems of each task")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--child", choices=RIDES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(RIDES[args.child], args.at_once[0], args.per_task, args.turns)))
        return
    results: dict[str, dict[str, list[float]]] = {}
    sizes = "--per-task", str(args.per_task), "--turns", str(args.turns)
    for ride, at_once in itertools.product(RIDES, map(str, args.at_once)):
        by_lever = child(__file__, "--child", ride, "--at-once", at_once, *sizes)
        for name, ratios in by_lever.items():
            results.setdefault(name, {})[at_once] = ratios
            print(
                f"{name:34}{at_once:>4} at a time: {statistics.median(ratios):.2f} x "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    write(args.json, "turns", results)


if __name__ == "__main__":
    main()
