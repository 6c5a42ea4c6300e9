"""How a denoise step grows with the requests that share it, and what a request holds.

    .venv/bin/python benchmarks/growth.py --json benchmarks/results/growth.json

`tiny-llada2` runs in this process. The benchmark gives the median step at 1 to 64 requests, and the
exponent between these ends (1 would mean one request after the other). It measures the same step
again after some thousand requests have come and gone. It also gives the bytes that one more request
holds: its keys and values, and its slot.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from tqdm import tqdm  # noqa: E402

from benchmarks.step_time import Stopwatch, instrument, measure  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402

PROMPT, MAX_TOKENS = 100, 64


def pass_through(llm: Any, requests: int, at_once: int) -> None:
    """Run a number of short requests from start to end."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with tqdm(total=requests, unit="request", leave=False) as bar:
        for begin in range(0, requests, at_once):
            batch = range(begin, min(begin + at_once, requests))
            prompts = [
                {"prompt_token_ids": [3 + (n + 5 * i) % 200 for i in range(20)]} for n in batch
            ]
            llm.generate(prompts, params, use_tqdm=False)
            bar.update(len(batch))


def tensors_of(value: Any, depth: int = 5) -> Iterator[Any]:
    """The tensors that an object holds, some more than once."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        parts = (
            value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
        )
        for part in parts:
            yield from tensors_of(part, depth - 1)


def held(core: Any, slots: int) -> dict[str, float]:
    """Bytes of one request: the pages of its tokens, and its rows of the slots' tensors."""
    runner = core.model_executor.driver_worker.worker.model_runner
    pages = tokens = 0
    for group in core.scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        needed = math.ceil((PROMPT + MAX_TOKENS) / spec.block_size)
        pages += len(group.layer_names) * needed * spec.page_size_bytes
        tokens += len(group.layer_names) * spec.page_size_bytes / spec.block_size
    rows = {
        tensor.data_ptr(): tensor.nbytes / slots
        for tensor in tensors_of(runner.model_state.slots)
        if tensor.ndim and tensor.shape[0] == slots
    }
    return {
        "kv_bytes_per_token": tokens,
        "kv_bytes_per_request": pages,
        "slot_bytes_per_request": sum(rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--finished", type=int, default=2000, help="requests that come and go")
    parser.add_argument("--steps", type=int, default=60, help="steady steps to time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from vllm import LLM

    slots = max(args.requests)
    llm = LLM(
        model=str(TINY_LLADA2),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=2048,
        max_num_seqs=slots,
        enable_prefix_caching=False,
    )
    core = llm.llm_engine.engine_core.engine_core
    watch = Stopwatch()
    instrument(core, watch)

    def step(requests: int, last: int) -> dict[str, float]:
        return measure(llm, watch, requests, PROMPT, last)

    step(slots, 10)  # warm up
    parts = {requests: step(requests, args.steps) for requests in args.requests}
    pass_through(llm, args.finished, slots)
    after = {requests: step(requests, args.steps)["total"] for requests in (1, slots)}
    results = {
        "steps": {str(n): times["total"] for n, times in parts.items()},
        "outside": {str(n): times["total"] - times["forward"] for n, times in parts.items()},
        "exponent": exponent({n: times["total"] for n, times in parts.items()}),
        "finished": args.finished,
        "after": {str(n): ms for n, ms in after.items()},
        "held": held(core, slots),
    }
    show(results)
    write(args.json, "growth, ms, median", results)


def exponent(steps: dict[int, float]) -> float:
    """The exponent of requests in the time of a step, between the fewest and the most requests."""
    fewest, most = min(steps), max(steps)
    if fewest == most:
        return math.nan
    return math.log(steps[most] / steps[fewest]) / math.log(most / fewest)


def show(results: dict[str, Any]) -> None:
    for requests, ms in results["steps"].items():
        outside = results["outside"][requests]
        print(f"{requests:>4} requests {ms:8.2f} ms a step, {outside:6.2f} ms outside the forward")
    print(f"exponent {results['exponent']:.2f}")
    for requests, ms in results["after"].items():
        before = results["steps"][requests]
        print(
            f"{requests:>4} requests {ms:8.2f} ms a step after {results['finished']} requests "
            f"({before:.2f} before)"
        )
    memory = results["held"]
    print(
        f"a request of {PROMPT} + {MAX_TOKENS} tokens: "
        f"{memory['kv_bytes_per_request'] / 1024:.0f} KiB of keys and values "
        f"({memory['kv_bytes_per_token']:.0f} bytes a token), "
        f"{memory['slot_bytes_per_request'] / 1024:.1f} KiB of slot"
    )


if __name__ == "__main__":
    main()
