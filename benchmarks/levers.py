"""What each lever that saves forward passes saves, and that it changes no answer.

    .venv/bin/python benchmarks/levers.py --json benchmarks/results/levers.json

The same held-out problems are answered with every lever on, and with one lever off at a time. The
benchmark gives passes over a canvas for each request (a count, so it does not depend on the
machine) and tokens for each pass. It stops if an answer differs from that with every lever on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import engines_in_this_process, write  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from examples.tiny.tasks import held_out_set  # noqa: E402
from tests.support.checkpoints import TINY_LLADA2  # noqa: E402
from tests.support.engine import engine  # noqa: E402

MODEL = TINY_LLADA2
# Lever -> the setting that switches it off.
LEVERS: dict[str, dict[str, Any]] = {
    "all on": {},
    "eos_early_stop off": {"eos_early_stop": False},
    "skip_last_commit off": {"skip_last_commit": False},
    "fused_commit off": {"fused_commit": False},
    "all off": {"eos_early_stop": False, "skip_last_commit": False, "fused_commit": False},
    "execution sync": {"execution": "sync"},
}


def answers(settings: dict[str, Any], prompts: Sequence[str], at_once: int) -> dict[str, Any]:
    """The answers of an engine with these settings, and the passes they took."""
    with engine(MODEL, 32, max_num_seqs=at_once, additional_config={"dllm": settings}) as running:
        params = running.llm.get_default_sampling_params()
        params.max_tokens = 64
        passes = 0
        execute = running.runner.execute_model

        def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += len(scheduler_output.scheduled_spec_decode_tokens)
            return execute(scheduler_output, *args, **kwargs)

        running.runner.execute_model = counted
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = running.llm.chat(chats, params, use_tqdm=False)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        del running.runner.execute_model
    return {"passes": passes, "tokens": sum(map(len, token_ids)), "answers": token_ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--per-task", type=int, default=20, help="problems of each task")
    parser.add_argument("--at-once", type=int, default=16, help="requests at a time")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    prompts = [problem.prompt for problem in held_out_set(args.per_task)]
    results: dict[str, dict[str, float]] = {}
    expected = None
    print("| levers | passes a request | tokens a pass | passes saved |")
    print("|---|---|---|---|")
    for name, off in LEVERS.items():
        measured = answers({"threshold": args.threshold} | off, prompts, args.at_once)
        expected = expected or measured
        if measured["answers"] != expected["answers"]:
            raise SystemExit(f"{name}: other answers than with all levers on")
        saved = 1 - expected["passes"] / measured["passes"]
        results[name] = {
            "passes_per_request": measured["passes"] / len(prompts),
            "tokens_per_pass": measured["tokens"] / measured["passes"],
            "saved": saved,
        }
        print(
            f"| {name} | {measured['passes'] / len(prompts):.2f} | "
            f"{measured['tokens'] / measured['passes']:.2f} | {saved:.0%} |",
            flush=True,
        )
    write(args.json, "levers", results)


if __name__ == "__main__":
    main()
