"""Prefill on one engine, decode on another: how many answers are those of a plain engine.

    .venv/bin/python benchmarks/kv_transfer.py --json benchmarks/results/kv_transfer.json

Three engines for each family, each in a process of its own with a core in another one: a plain one,
one that answers a token to each prompt and saves its pages (``kv_producer``), and one that loads
them (``kv_consumer``). Prompts are tasks of the tiny models, with lists of any length, so that they
have 0 to several pages. Pages are not cached within an engine, which would load less.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import quiet_engines, write  # noqa: E402

TINY = ROOT / "examples" / "tiny" / "checkpoints"
MODELS = ("tiny-llada2", "tiny-sdar", "tiny-diffusiongemma")
SCHEDULES = ("sync", "async")
PAGE, CONTEXT, ANSWER = 32, 512, 48


def prompts(count: int) -> list[str]:
    draw = random.Random(3)
    tasks = ("sort", "reverse", "copy")
    return [
        f"{draw.choice(tasks)} "
        + " ".join(str(draw.randrange(10, 100)) for _ in range(draw.randrange(1, 120)))
        for _ in range(count)
    ]


def one_engine(model: str, options: dict[str, Any], count: int, max_tokens: int) -> dict[str, Any]:
    """What an engine answers to all prompts, and how many of their tokens it has loaded."""
    quiet_engines()
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(TINY / model),
        dtype="float32",
        block_size=PAGE,
        max_model_len=CONTEXT,
        kv_cache_memory_bytes=1 << 27,
        enable_prefix_caching=False,
        disable_log_stats=False,
        enforce_eager=True,  # compiles nothing, which would take most of the time
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    done = llm.generate(prompts(count), params, use_tqdm=False)
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {
        "answers": [list(one.outputs[0].token_ids) for one in done],
        "tokens": [len(one.prompt_token_ids or ()) for one in done],
        "loaded": metrics.get("vllm:external_prefix_cache_hits", 0),
    }


def compared(model: str, count: int, asynchronous: bool) -> dict[str, Any]:
    """The three engines of a model."""

    def ask(transfer: dict[str, Any] | None, max_tokens: int) -> dict[str, Any]:
        options = {"async_scheduling": asynchronous, "kv_transfer_config": transfer}
        one = json.dumps([model, options, count, max_tokens])
        # Its core prints to the same output, so that answers go through a file.
        answered = Path(folder) / "answers"
        command = [sys.executable, __file__, "--one", one, "--json", str(answered)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(answered.read_text())
        return found

    with tempfile.TemporaryDirectory(prefix="vllm-dllm-kv-") as folder:
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        plain = ask(None, ANSWER)
        ask(connector | {"kv_role": "kv_producer"}, 1)
        saved = len(list(Path(folder).rglob("*.safetensors")))
        there = ask(connector | {"kv_role": "kv_consumer"}, ANSWER)
    equal = sum(a == b for a, b in zip(plain["answers"], there["answers"], strict=True))
    return {
        "prompts": count,
        "equal": equal,
        "different_answers": len(set(map(tuple, plain["answers"]))),
        "prompt_tokens": sum(there["tokens"]),
        "longest_prompt": max(there["tokens"]),
        "pages_saved": saved,
        "tokens_loaded": there["loaded"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        args.json.write_text(json.dumps(one_engine(*json.loads(args.one))))
        return
    results: dict[str, Any] = {}
    for way in args.schedules:
        for model in args.models:
            found = results[f"{model}, {way}"] = compared(model, args.prompts, way == "async")
            print(
                f"{model:20} {way:5} {found['equal']} of {found['prompts']} equal, "
                f"{found['tokens_loaded']} of {found['prompt_tokens']} tokens loaded",
                flush=True,
            )
            write(args.json, "kv_transfer", results)


if __name__ == "__main__":
    main()
