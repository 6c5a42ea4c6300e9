"""LLaDA2 through the engine, and in plain PyTorch with and without a KV cache.

    .venv/bin/python benchmarks/llada2.py --json benchmarks/results/llada2.json

`tiny-llada2` answers the same held-out problems on one machine, in one run, with one thread, in
float32. The engine takes a new request whenever one has ended. The loops
(`benchmarks/plain_llada2.py`) take a batch of problems and wait for its slowest. The benchmark
stops if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import child, engines_in_this_process, in_flight, mixed_problems, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from examples.tiny.tokens import llada2_tokenizer  # noqa: E402
from examples.tiny.training import Encoder  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402

MODEL = TINY_LLADA2
THRESHOLD, MAX_TOKENS = 0.9, 64
KINDS = ("vllm-dllm", "cached", "recomputing")


def prompts(per_task: int, tokenizer: Any) -> list[list[int]]:
    """Token ids of held-out problems."""
    encoder = Encoder(tokenizer)
    return [encoder(problem).prompt for problem in mixed_problems(per_task)]


def served(model: Path = MODEL, **options: Any) -> Any:
    """An engine for `answers`."""
    from vllm import LLM

    settings = {"additional_config": {"dllm": {"threshold": THRESHOLD}}}
    return LLM(
        model=str(model),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        **(settings | options),
    )


def answers(
    llm: Any, questions: Sequence[list[int]], at_once: int, temperature: float | None = None
) -> list[list[int]]:
    """Token ids of the answers, `at_once` at a time; a temperature of None is the model's own."""
    params = llm.get_default_sampling_params()
    params.max_tokens, params.seed = MAX_TOKENS, 0
    if temperature is not None:
        params.temperature = temperature
    inputs = ({"prompt_token_ids": ids} for ids in questions)
    ended = in_flight(llm.llm_engine, inputs, params, at_once)
    by_number = {number: list(output.outputs[0].token_ids) for number, _, output in ended}
    return [by_number[number] for number in range(len(questions))]


def through_loop(cached: bool) -> Any:
    import torch

    from benchmarks.plain_llada2 import Cached, Recomputing, Rules, generate
    from examples.tiny.llada2 import load

    torch.set_num_threads(1)
    config = json.loads((MODEL / "config.json").read_text())
    end = frozenset({config["eos_token_id"]})
    rules = Rules(config["mask_token_id"], end, THRESHOLD, MAX_TOKENS)
    reader = (Cached if cached else Recomputing)(load(MODEL))

    def run(questions: Sequence[list[int]], at_once: int) -> list[list[int]]:
        batches = (questions[n : n + at_once] for n in range(0, len(questions), at_once))
        return [answer for batch in batches for answer in generate(reader, batch, rules)]

    return run


def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answers, and seconds of each repeat for each number of requests at a time."""
    run = partial(answers, served()) if kind == KINDS[0] else through_loop(kind == "cached")
    questions = prompts(args.per_task, llada2_tokenizer())
    last_answers = run(questions[:32], 16)  # warm up
    seconds: dict[str, list[float]] = {}
    for at_once in args.at_once:
        for _ in range(args.repeats):
            begin = time.perf_counter()
            last_answers = run(questions, at_once)
            seconds.setdefault(str(at_once), []).append(time.perf_counter() - begin)
    return {"answers": last_answers, "seconds": seconds}


def figures(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second of each kind at each number of requests.

    Raises:
        RuntimeError: their answers differ.
    """
    expected = measured[KINDS[0]]["answers"]
    for kind in KINDS:
        if measured[kind]["answers"] != expected:
            raise RuntimeError(f"{kind}: other answers; the figures would mean nothing")
    tokens = sum(map(len, expected))
    return {
        at_once: {kind: tokens / min(measured[kind]["seconds"][at_once]) for kind in KINDS}
        | {"seconds": {kind: measured[kind]["seconds"][at_once] for kind in KINDS}}
        for at_once in measured[KINDS[0]]["seconds"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--per-task", type=int, default=20, help="problems of each task")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args)))
        return
    shared = ["--per-task", str(args.per_task), "--repeats", str(args.repeats)]
    shared += ["--at-once", *map(str, args.at_once)]
    measured = {kind: child(__file__, "--child", kind, *shared) for kind in KINDS}
    results = figures(measured)
    print(f"{'tokens per second':20}" + "".join(f"{kind:>14}" for kind in KINDS))
    for at_once, by_kind in results.items():
        ours = by_kind[KINDS[0]]
        print(
            f"{at_once + ' at a time':20}"
            + "".join(f"{by_kind[kind]:14.0f}" for kind in KINDS)
            + "".join(f"   {ours / by_kind[kind]:.2f} x {kind}" for kind in KINDS[1:])
        )
    write(args.json, "llada2", results)


if __name__ == "__main__":
    main()
