"""Exact match on held-out problems, through the real engine, for any settings side by side.

    .venv/bin/python benchmarks/accuracy.py MODEL --setting threshold=0.9 --setting threshold=1.01
    .venv/bin/python benchmarks/accuracy.py MODEL --http --per-task 100 --json out.json
    .venv/bin/python benchmarks/accuracy.py QUANTIZED... --against ORIGINAL

A setting is a list of `name=value`. A name is one of the server's `dllm` table (docs/settings.md),
a request option (`diffusion_...`) or one of vLLM's sampling parameters (`temperature`, `seed`,
...). Every setting answers the same problems (`examples/tiny/tasks.py`). The benchmark prints the
rate of exact matches with its 95 % interval, the steps per block (forward passes of a request,
including those that commit), the answer's tokens per step, and the wall time. `--against` compares
a quantized checkpoint with its original: the share of exact matches and of committed tokens that it
keeps, and how many more steps a block takes.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import quiet_engines, write  # noqa: E402

quiet_engines()  # before torch and vLLM are imported

from tqdm import tqdm  # noqa: E402

from examples.tiny.tasks import Problem, held_out_set  # noqa: E402
from tests.support.statistics import wilson_interval  # noqa: E402
from vllm_dllm.commands.local_server import (  # noqa: E402
    SERVED_NAME,
    ServerError,
    post,
    read_counter,
    serve,
)


def agreement(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """The share of committed tokens that agree by position; a missing token agrees with none."""
    same = sum(
        a == b
        for first_answer, second_answer in zip(first, second, strict=True)
        for a, b in zip(first_answer, second_answer, strict=False)
    )
    longest = sum(
        max(len(first_answer), len(second_answer))
        for first_answer, second_answer in zip(first, second, strict=True)
    )
    return same / longest if longest else 1.0


def recovery(
    quantized: dict[str, Any], original: dict[str, Any], problems: Sequence[Problem]
) -> dict[str, Any]:
    """The share of the original's exact matches, tokens and speed that is left.

    Both are summaries (`accuracy.summary`) with their `answers` and `tokens`, problem by problem.
    """
    ours, theirs = (
        [text == problem.answer for text, problem in zip(run["answers"], problems, strict=True)]
        for run in (quantized, original)
    )
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "recovery_percent": 100 * sum(ours) / sum(theirs) if any(theirs) else None,
        "lost": sum(before and not now for now, before in pairs),
        "gained": sum(now and not before for now, before in pairs),
        "token_agreement": agreement(quantized["tokens"], original["tokens"]),
        "steps_per_block": quantized["steps_per_block"],
        "steps_per_block_original": original["steps_per_block"],
        "steps_ratio": quantized["steps_per_block"] / original["steps_per_block"],
    }


SAMPLING = {"temperature", "seed", "top_p", "top_k", "min_p", "max_tokens"}
STEPS = "vllm:diffusion_num_denoising_steps"
MAX_TOKENS = 64
# A checkpoint that takes more than this many times the original's steps is pointed out.
MANY_STEPS = 1.1


@dataclass(frozen=True)
class Setting:
    """A setting: its text on the command line, and where each of its values goes."""

    text: str
    server: dict[str, Any]
    request: dict[str, Any]
    sampling: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From `name=value,name=value`; the empty text stands for the defaults."""
        setting = cls(text or "defaults", {}, {}, {})
        for pair in filter(None, text.split(",")):
            name, separator, value = pair.partition("=")
            if not separator:
                raise argparse.ArgumentTypeError(f"{pair!r} is not name=value")
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
            room = setting.request if name.startswith("diffusion_") else setting.server
            (setting.sampling if name in SAMPLING else room)[name] = value
        return setting


@dataclass(frozen=True)
class Answer:
    """The answer to one problem."""

    text: str
    prompt_tokens: int
    tokens: int
    ids: tuple[int, ...] = ()  # of the answer; over HTTP there are none


@dataclass
class Run:
    """The answers of one setting, and what they cost."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    steps: float = 0.0


def blocks_of(answer: Answer, length: int, aligned: bool) -> int:
    """Blocks that an answer reached into; aligned blocks begin at multiples of the length."""
    start = answer.prompt_tokens % length if aligned else 0
    return -(-(start + answer.tokens) // length)


def summary(run: Run, problems: Sequence[Problem], length: int, aligned: bool) -> dict[str, Any]:
    """Rates by task and over all, steps, steps per block, tokens per step and second, seconds.

    `length` and `aligned` are those of `canvas_of`.
    """
    right: dict[str, list[bool]] = {}
    for problem, answer in zip(problems, run.answers, strict=True):
        right.setdefault(problem.task, []).append(answer.text == problem.answer)
    right["all"] = [hit for hits in right.values() for hit in hits]
    tokens = sum(answer.tokens for answer in run.answers)
    blocks = sum(blocks_of(answer, length, aligned) for answer in run.answers)
    return {
        "exact_match": {
            task: {
                "right": sum(hits),
                "of": len(hits),
                "interval": wilson_interval(sum(hits), len(hits)),
            }
            for task, hits in right.items()
        },
        "steps": run.steps,
        "steps_per_block": run.steps / blocks,
        "tokens_per_step": tokens / run.steps,
        "tokens_per_second": tokens / run.seconds,
        "seconds": run.seconds,
    }


@contextlib.contextmanager
def offline(
    model: str,
    server: dict[str, Any],
    concurrency: int,
    dtype: str,
    quantization: str | None = None,
    eager: bool = True,
) -> Iterator[Any]:
    """An engine; yields a function from (problems, setting) to a `Run`.

    The function also takes sampling parameters of each problem, which go before the setting's.
    """
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype=dtype,
        quantization=quantization,
        enforce_eager=eager,
        max_model_len=1024,
        max_num_seqs=concurrency,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
        additional_config={"dllm": server} if server else {},
        limit_mm_per_prompt={"image": 0, "video": 0},
    )

    def steps() -> float:
        return next((metric.value for metric in llm.get_metrics() if metric.name == STEPS), 0)

    def answer(
        problems: Sequence[Problem], setting: Setting, own: Sequence[dict[str, Any]] = ()
    ) -> Run:
        asked = []
        for sampling in own or [{}] * len(problems):
            params = llm.get_default_sampling_params()
            params.max_tokens = MAX_TOKENS
            for name, value in (setting.sampling | sampling).items():
                setattr(params, name, value)
            params.extra_args = setting.request or None
            asked.append(params)
        chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
        before, begin = steps(), time.monotonic()
        outputs = llm.chat(chats, asked)
        run = Run(seconds=time.monotonic() - begin, steps=steps() - before)
        for output in outputs:
            completion = output.outputs[0]
            ids = tuple(completion.token_ids)
            run.answers.append(Answer(completion.text, len(output.prompt_token_ids), len(ids), ids))
        return run

    try:
        yield answer
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def over_http(model: str, server: dict[str, Any], concurrency: int, dtype: str) -> Iterator[Any]:
    """A server; yields the same function as `offline`, over chat completions."""
    flags = ["--dtype", dtype, "--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    if server:
        flags += ["--additional-config", json.dumps({"dllm": server})]

    def answer(problems: Sequence[Problem], setting: Setting) -> Run:
        def ask(problem: Problem) -> Answer:
            body = {"model": SERVED_NAME, "max_tokens": MAX_TOKENS, **setting.sampling}
            body["messages"] = [{"role": "user", "content": problem.prompt}]
            if setting.request:
                body["vllm_xargs"] = setting.request
            reply = post(f"{url}/v1/chat/completions", body)
            usage = reply["usage"]
            text = reply["choices"][0]["message"]["content"] or ""
            return Answer(text, usage["prompt_tokens"], usage["completion_tokens"])

        before, begin = read_counter(url, f"{STEPS}_total"), time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
            answers = list(tqdm(pool.map(ask, problems), total=len(problems), unit="problem"))
        seconds = time.monotonic() - begin
        return Run(answers, seconds, read_counter(url, f"{STEPS}_total") - before)

    with serve(model, *flags, max_num_seqs=concurrency) as url:
        yield answer


def canvas_of(model: str) -> tuple[int, bool]:
    """The length of a model's blocks, and whether they begin at its multiples or after the prompt.

    A window or a canvas of several blocks does not change them.
    """
    from vllm.transformers_utils.config import get_config

    import vllm_dllm.plugin

    vllm_dllm.plugin.register()
    config = get_config(model, trust_remote_code=False)
    return config.canvas_length, config.model_type != "diffusion_gemma"


def show(text: str, result: dict[str, Any]) -> None:
    """Print the table of one setting."""
    print(f"\n{text}")
    for task, score in result["exact_match"].items():
        low, high = (100 * bound for bound in score["interval"])
        rate = 100 * score["right"] / score["of"]
        print(f"  {task:10}{rate:6.1f} %   [{low:5.1f}, {high:5.1f}]   of {score['of']}")
    print(
        f"  {result['steps_per_block']:.2f} steps per block, "
        f"{result['tokens_per_step']:.2f} tokens per step, {result['seconds']:.1f} s"
    )


def compare(results: dict[str, dict[str, Any]]) -> None:
    """Print one line for each setting."""
    print(f"\n{'setting':32}{'exact match':>12}{'interval':>18}{'steps/block':>13}{'s':>8}")
    for text, result in results.items():
        score = result["exact_match"]["all"]
        low, high = (100 * bound for bound in score["interval"])
        print(
            f"{text:32}{100 * score['right'] / score['of']:10.1f} %   [{low:5.1f}, {high:5.1f}]"
            f"{result['steps_per_block']:13.2f}{result['seconds']:8.1f}"
        )


def show_recovery(text: str, recovery: dict[str, Any]) -> None:
    """Print the comparison of one setting with the original."""
    percent = recovery["recovery_percent"]
    print(f"\n{text}: against the original")
    print(
        f"  recovery {'-' if percent is None else f'{percent:.1f} %'}   "
        f"({recovery['lost']} lost, {recovery['gained']} gained)   "
        f"{100 * recovery['token_agreement']:.1f} % of committed tokens agree"
    )
    ratio = recovery["steps_ratio"]
    print(
        f"  {recovery['steps_per_block']:.2f} steps per block, "
        f"{recovery['steps_per_block_original']:.2f} before ({ratio:.2f} times)"
    )
    if ratio > MANY_STEPS:
        print(f"  MORE STEPS: quantization costs {100 * (ratio - 1):.0f} % more of them")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--setting", type=Setting.parse, action="append", metavar="NAME=VALUE,...")
    parser.add_argument("--http", action="store_true", help="through `vllm serve`")
    parser.add_argument("--per-task", type=int, default=50, help="problems of each task")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write figures and answers here")
    parser.add_argument("--compiled", action="store_true", help="as served; otherwise eager")
    parser.add_argument("--against", metavar="MODEL", help="the original of quantized MODELs")
    parser.add_argument("--quantization", help="vLLM's --quantization, for MODELs alone")
    args = parser.parse_args()
    if args.http and (args.against or args.quantization):
        parser.error("--against and --quantization compare tokens, which --http does not see")
    if args.http and args.compiled:
        parser.error("--compiled is for engines in this process; the server of --http is eager")
    problems = held_out_set(args.per_task, args.seed)
    originals = measure(args.against, args, problems) if args.against else {}
    results = {}
    for model in args.models:
        measured = measure(model, args, problems, args.quantization)
        compare(measured)
        for text, result in measured.items():
            if originals:
                result["against"] = recovery(result, originals[text], problems)
                show_recovery(f"{Path(model).name}, {text}", result["against"])
        # The names of the models tell their results apart.
        named = {f"{Path(model).name}, {text}": result for text, result in measured.items()}
        results |= measured if len(args.models) == 1 else named
    transport = "over HTTP" if args.http else "offline"
    write(args.json, f"accuracy, {transport}, {len(problems)} problems", results)
    return 0


def measure(
    model: str,
    args: argparse.Namespace,
    problems: Sequence[Problem],
    quantization: str | None = None,
) -> dict[str, dict[str, Any]]:
    """The summary of each setting, with the answers."""
    settings: list[Setting] = args.setting or [Setting.parse("")]
    canvas, results = canvas_of(model), {}
    # Settings that differ only in request options share one engine.
    for server in {json.dumps(setting.server): setting.server for setting in settings}.values():
        if args.http:
            path = over_http(model, server, args.concurrency, args.dtype)
        else:
            eager = not args.compiled
            path = offline(model, server, args.concurrency, args.dtype, quantization, eager)
        with path as answer:
            answer(problems[:: max(1, len(problems) // 8)], settings[0])  # warm up
            for setting in settings:
                if setting.server == server:
                    run = answer(problems, setting)
                    results[setting.text] = summary(run, problems, *canvas)
                    results[setting.text]["answers"] = [a.text for a in run.answers]
                    results[setting.text]["tokens"] = [list(a.ids) for a in run.answers]
                    show(setting.text, results[setting.text])
    return {setting.text: results[setting.text] for setting in settings}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(str(error))
