"""Where does a denoise step go? Schedule, prepare, forward, head, decoding and the rest.

    .venv/bin/python benchmarks/step_time.py --model CHECKPOINT --requests 1 16

Runs the engine in this process with one denoise step a token, and times the parts of each
steady step (every request denoises, none prefills or commits). Prints medians in
milliseconds and writes them as JSON with ``--json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import engines_in_this_process, write

engines_in_this_process()  # before torch and vLLM are imported

from examples.tiny.make_twin import make_twin  # noqa: E402

# Part -> what it covers. A part's own time excludes parts nested in it.
PARTS = {
    "schedule": "scheduler: choose requests, account KV blocks, take the result back",
    "prepare": "worker: input batch, block tables, attention metadata",
    "forward": "the model without its head",
    "head": "hidden states to logits",
    "decoding": "row statistics, algorithm, slot state",
    "rest": "everything else in the engine's step",
}
# Options with which a canvas takes all of its steps, by whether the model is one of uniform noise.
SLOWEST = {
    False: {"diffusion_threshold": 2.0},
    True: {"diffusion_stability_threshold": 1000},
}


class Stopwatch:
    """Self times of nested parts, one record per step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.current: dict[str, float] = defaultdict(float)
        self.stack: list[list[float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.stack.append([0.0])
        begin = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            inner = self.stack.pop()[0]
            self.current[name] += elapsed - inner
            if self.stack:
                self.stack[-1][0] += elapsed

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)

    def finish_step(self, steady: bool) -> None:
        if steady:
            self.steps.append(dict(self.current))
        self.current.clear()


def instrument(core: Any, watch: Stopwatch) -> None:
    """Attach the stopwatch to a live engine."""
    runner = core.model_executor.driver_worker.worker.model_runner
    watch.wrap(core.scheduler, "schedule", "schedule")
    watch.wrap(core.scheduler, "update_from_output", "schedule")
    for method in ("prepare_inputs", "prepare_attn", "gather_batch_req_state"):
        watch.wrap(runner, method, "prepare")
    watch.wrap(runner.model_state, "prepare_attn", "prepare")
    if callable(runner.sampler.readout.head):  # a model of noise decodes tile by tile of its head
        watch.wrap(runner.sampler.readout, "head", "head")
    watch.wrap(runner, "sample", "decoding")
    forward = runner.model.forward

    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        with watch.part("forward"):
            return forward(*args, **kwargs)

    runner.model.forward = timed_forward


def measure(llm: Any, watch: Stopwatch, requests: int, prompt: int, steps: int) -> dict[str, float]:
    """Median self times of steady denoise steps with ``requests`` requests, in milliseconds."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    params = SamplingParams(
        temperature=0,
        max_tokens=4096,
        ignore_eos=True,
        extra_args=SLOWEST[engine.model_config.hf_config.model_type == "diffusion_gemma"],
    )
    for i in range(requests):
        ids = [3 + (7 * i + j) % 200 for j in range(prompt)]
        engine.add_request(f"r{requests}-{i}", {"prompt_token_ids": ids}, params)
    watch.steps.clear()
    while len(watch.steps) < steps:
        watch.current.clear()
        with watch.part("rest"):
            quiet = step(core)
        total_drafts = core.scheduler.num_spec_tokens * requests
        watch.finish_step(steady=quiet and waiting_drafts(core) == total_drafts)
    engine.abort_request([f"r{requests}-{i}" for i in range(requests)])
    step(core)
    warm = watch.steps[len(watch.steps) // 5 :]
    return {
        part: 1e3 * statistics.median(step.get(part, 0.0) for step in warm) for part in PARTS
    } | {"total": 1e3 * statistics.median(sum(step.values()) for step in warm)}


def step(core: Any) -> bool:
    """One step of the engine core as its own loop runs it; true if no canvas was committed."""
    outputs, executed = core.step_fn()
    core.post_step(executed)
    return not any(o.outputs for o in (outputs or {}).values())


def waiting_drafts(core: Any) -> int:
    """Draft tokens that wait for the next step: L for each request that denoises."""
    return sum(len(request.spec_token_ids) for request in core.scheduler.running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="checkpoint; default: the seeded twin of examples/tiny")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=100, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=150, help="steady steps to time")
    parser.add_argument("--compiled", action="store_true", help="compile the model, as by default")
    parser.add_argument("--json", type=Path, help="write the medians here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or str(make_twin(Path(scratch) / "twin"))
        results = run(model, args)
    print_table(results)
    write(args.json, "step_time, ms, median", {str(n): r for n, r in results.items()})


def run(model: str, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=not args.compiled,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=2048,
        max_num_seqs=max(args.requests),
    )
    watch = Stopwatch()
    instrument(llm.llm_engine.engine_core.engine_core, watch)
    return {n: measure(llm, watch, n, args.prompt, args.steps) for n in args.requests}


def print_table(results: dict[int, dict[str, float]]) -> None:
    print(f"{'ms per denoise step':22}" + "".join(f"{n:>12} req" for n in results))
    for part in [*PARTS, "total"]:
        print(f"{part:22}" + "".join(f"{r[part]:16.2f}" for r in results.values()))
    outside = (r["total"] - r["forward"] for r in results.values())
    print(f"{'outside the forward':22}" + "".join(f"{value:16.2f}" for value in outside))


if __name__ == "__main__":
    main()
