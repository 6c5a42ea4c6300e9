"""SDAR through the engine, in a plain loop, and the same weights served token by token.

    .venv/bin/python benchmarks/sdar.py --json benchmarks/results/sdar.json

Two parts, in one run on one machine, with one thread:

- `tiny-sdar` answers held-out problems, in float32. The engine is as a user gets it, and takes a
  new request whenever one has ended; the loop (`benchmarks/plain_sdar.py`) takes one problem after
  another, or a batch in lockstep that waits for its slowest. The benchmark stops if an answer
  differs.
- A model of random weights, 1024 wide with 8 layers and 151,936 ids, in bfloat16, so that reading
  weights dominates. Blocks of 4 are decided in two steps each. A commit is a pass of its own, or
  shares one with the next block (`dllm.fused_commit`); the loop and the autoregressive model with
  the same weights stand beside that. Passes over canvases are counted.

The systems of each part take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import child, engines_in_this_process, in_flight, mixed_problems, write  # noqa: E402
from benchmarks.tables import markdown, sdar_tiny, sdar_wide  # noqa: E402

engines_in_this_process()  # before torch and vLLM are imported

from tests.support.checkpoints import TINY_SDAR  # noqa: E402

BLOCK, MASK, VOCABULARY = 4, 151_669, 151_936
THRESHOLD, MAX_TOKENS = 0.9, 64
LOOP = "loop"
TINY_KINDS = ("vllm-dllm", LOOP)
# How the wide model is served: options of an engine.
WIDE: dict[str, dict[str, Any]] = {
    "two blocks": {"fused_commit": "on", "asynchronous": True},
    "separate": {"fused_commit": "off", "asynchronous": True},
    "granted": {"fused_commit": "on", "asynchronous": False},
}
AUTOREGRESSIVE = "autoregressive"
WIDE_KINDS = (*WIDE, LOOP, AUTOREGRESSIVE)
PROMPT = 128
# Tokens of each answer: fewer where many are asked for, which take long.
OUTPUT = {1: 128, 4: 128}
OTHERWISE = 32
Run = Callable[[Sequence[list[int]], int], list[list[int]]]


def served(model: Path, dtype: str, **options: Any) -> Any:
    """An engine for `ask`."""
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
        **options,
    )


def ask(llm: Any, params: Any) -> Run:
    """Answers an engine's prompts, so many at a time."""
    wide = params.ignore_eos

    def run(prompts: Sequence[list[int]], at_once: int) -> list[list[int]]:
        if wide:
            params.max_tokens = OUTPUT.get(at_once, OTHERWISE)
        inputs = ({"prompt_token_ids": ids} for ids in prompts)
        ended = in_flight(llm.llm_engine, inputs, params, at_once)
        by_number = {number: list(output.outputs[0].token_ids) for number, _, output in ended}
        return [by_number[number] for number in range(len(prompts))]

    return run


def in_batches(generate: Callable[[Sequence[list[int]]], list[list[int]]]) -> Run:
    """Answers prompts in batches of so many, one batch after the other."""

    def run(prompts: Sequence[list[int]], at_once: int) -> list[list[int]]:
        batches = (prompts[n : n + at_once] for n in range(0, len(prompts), at_once))
        return [answer for batch in batches for answer in generate(batch)]

    return run


def tiny(kind: str) -> Run:
    """`tiny-sdar` in float32, by the family's default rule."""
    import torch

    from benchmarks.plain_sdar import Rules, generate, load

    if kind != LOOP:
        settings = {"dllm": {"threshold": THRESHOLD}}
        llm = served(TINY_SDAR, "float32", additional_config=settings)
        params = llm.get_default_sampling_params()
        params.max_tokens = MAX_TOKENS
        return ask(llm, params)
    torch.set_num_threads(1)
    config = json.loads((TINY_SDAR / "generation_config.json").read_text())
    mask = json.loads((TINY_SDAR / "config.json").read_text())["mask_token_id"]
    end = frozenset(config["eos_token_id"])
    rules = Rules(mask, end, BLOCK, THRESHOLD, BLOCK, MAX_TOKENS)
    model = load(TINY_SDAR, torch.float32)
    return in_batches(lambda prompts: generate(model, prompts, rules))


def wide(kind: str, path: Path, passes: list[int]) -> Run:
    """The wide model in bfloat16, two steps a block; `passes` counts those over canvases."""
    import torch
    from vllm import SamplingParams

    from benchmarks.plain_sdar import Rules, generate, load

    if kind == LOOP:
        torch.set_num_threads(1)
        model = load(path, torch.bfloat16)

        def answer(prompts: Sequence[list[int]]) -> list[list[int]]:
            tokens = OUTPUT.get(len(prompts), OTHERWISE)
            return generate(model, prompts, Rules(MASK, frozenset(), BLOCK, 2.0, 2, tokens))

        return in_batches(answer)
    params = SamplingParams(temperature=0, max_tokens=OTHERWISE, ignore_eos=True)
    if kind == AUTOREGRESSIVE:
        overrides = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        return ask(served(autoregressive(path, overrides), "bfloat16"), params)
    way = WIDE[kind]
    settings = {"dllm": {"fused_commit": way["fused_commit"]}}
    params.extra_args = {"diffusion_algorithm": "LowConfidenceStatic", "diffusion_steps": 2}
    options = {"async_scheduling": way["asynchronous"], "additional_config": settings}
    llm = served(path, "bfloat16", **options)
    core = llm.llm_engine.engine_core.engine_core
    update = core.model_executor.driver_worker.worker.model_runner.sampler.canvas_update
    plan = update.plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes[0] += 1
        return plan(*args, **kwargs)

    update.plan = counted
    return ask(llm, params)


def write_wide(path: Path) -> None:
    """A checkpoint of random weights with the tokenizer of the tiny one; prompts are token ids."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes)).to(torch.bfloat16).save_pretrained(path)
    for file in TINY_SDAR.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
    config |= {"block_size": BLOCK, "mask_token_id": MASK}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").unlink(missing_ok=True)


def autoregressive(path: Path, overrides: dict[str, Any]) -> Path:
    """The same files under another configuration."""
    other = path.with_name("autoregressive")
    if not other.exists():
        other.mkdir()
        for file in path.iterdir():
            (other / file.name).symlink_to(file)
        config = json.loads((path / "config.json").read_text()) | overrides
        (other / "config.json").unlink()
        (other / "config.json").write_text(json.dumps(config))
    return other


def timed(run: Run, prompts: Sequence[list[int]], at_once: int) -> tuple[float, list[list[int]]]:
    """Seconds of the whole run, and the answers."""
    begin = time.perf_counter()
    answers = run(prompts, at_once)
    return time.perf_counter() - begin, answers


def measure_tiny(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answers, and seconds of each repeat for each number of requests at a time."""
    from examples.tiny.tokens import sdar_tokenizer
    from examples.tiny.training import Encoder

    tokenizer = sdar_tokenizer()
    encoder = Encoder(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    prompts = [encoder(problem).prompt for problem in mixed_problems(args.per_task)]
    run, answers = tiny(kind), list[list[int]]()
    run(prompts[:32], 16)  # warm up
    seconds: dict[str, list[float]] = {}
    for at_once in args.at_once:
        for _ in range(args.repeats):
            took, answers = timed(run, prompts, at_once)
            seconds.setdefault(str(at_once), []).append(took)
    return {"answers": answers, "seconds": seconds}


def measure_wide(kind: str, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repeat, and passes over canvases, for each number of requests."""
    draw, passes = random.Random(5), [0]
    run = wide(kind, path, passes)
    prompts = [[draw.randrange(MASK) for _ in range(PROMPT)] for _ in range(max(args.wide))]
    run(prompts[:2], 2)  # warm up
    found: dict[str, Any] = {}
    for at_once in args.wide:
        seconds = []
        for _ in range(args.repeats):
            passes[0] = 0
            took, answers = timed(run, prompts[:at_once], at_once)
            tokens = OUTPUT.get(at_once, OTHERWISE)
            if any(len(answer) != tokens for answer in answers):
                raise RuntimeError(f"{kind}: an answer is not {tokens} tokens long")
            seconds.append(took)
        found[str(at_once)] = {"seconds": seconds, "passes": passes[0]}
    return found


def tiny_figures(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Tokens per second (the best of all turns) at each number of requests.

    Raises:
        RuntimeError: the answers differ.
    """
    ours, *others = (turn for turns in rounds.values() for turn in turns)
    if any(other["answers"] != ours["answers"] for other in others):
        raise RuntimeError("the loop has other answers; the figures would mean nothing")
    tokens = sum(map(len, ours["answers"]))
    return {
        at_once: {
            kind: tokens / min(second for turn in turns for second in turn["seconds"][at_once])
            for kind, turns in rounds.items()
        }
        for at_once in ours["seconds"]
    }


def wide_figures(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Tokens per second (the best of all turns) and passes a block at each number of requests."""
    found: dict[str, Any] = {}
    for kind, turns in rounds.items():
        for at_once in turns[0]:
            seconds = [each for turn in turns for each in turn[at_once]["seconds"]]
            tokens = OUTPUT.get(int(at_once), OTHERWISE)
            found.setdefault(at_once, {})[kind] = {
                "tokens_per_second": int(at_once) * tokens / min(seconds),
                "seconds": seconds,
                "passes_per_block": turns[0][at_once]["passes"] * BLOCK / tokens,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--wide", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--per-task", type=int, default=20, help="problems of each task")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--turns", type=int, default=2, help="in which the systems run one after another"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.child:
        part, kind = args.child
        found = measure_tiny(kind, args) if part == "tiny" else None
        print(json.dumps(found or measure_wide(kind, args.checkpoint, args)))
        return
    shared = ["--per-task", str(args.per_task), "--repeats", str(args.repeats)]
    shared += ["--at-once", *map(str, args.at_once), "--wide", *map(str, args.wide)]
    small: dict[str, list[dict[str, Any]]] = {kind: [] for kind in TINY_KINDS}
    for _ in range(args.turns):
        for kind, turns in small.items():
            turns.append(child(__file__, "--child", "tiny", kind, *shared))
    results: dict[str, Any] = {"tiny": tiny_figures(small)}
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in WIDE_KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "wide"
        write_wide(path)
        for _ in range(args.turns):
            for kind, turns in rounds.items():
                place = ["--checkpoint", str(path)]
                turns.append(child(__file__, "--child", "wide", kind, *shared, *place))
    results["wide"] = wide_figures(rounds)
    for rows in (sdar_tiny(results), sdar_wide(results)):
        print("\n".join(markdown(rows)), end="\n\n")
    write(args.json, "sdar", results)


if __name__ == "__main__":
    main()
