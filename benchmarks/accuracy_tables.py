"""The tables of `accuracy.py`, `wrapped_tasks.py` and `fidelity.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.support.statistics import wilson_interval

# A checkpoint that takes more than this many times the original's steps is pointed out.
MANY_STEPS = 1.1


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


def accuracy(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    # If all settings are of one option, its name heads the column and its values are the rows.
    options = {setting.rpartition("=")[0] for setting in results}
    option = options.pop() if len(options) == 1 else ""
    title = option.removeprefix("diffusion_") or "setting"
    yield [title, "exact match", "95 % interval", "steps per block", "seconds"]
    for setting, result in results.items():
        match = result["exact_match"]["all"]
        low, high = (100 * bound for bound in match["interval"])
        yield [
            setting.removeprefix(f"{option}="),
            f"{100 * match['right'] / match['of']:.1f} %",
            f"{low:.1f} - {high:.1f}",
            f"{result['steps_per_block']:.2f}",
            f"{result['seconds']:.1f}",
        ]


def fidelity(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """The rows of the documentation's table: the header, then the rows."""
    yield [
        *("model", "dtype", "median error", "worst", "of the logits", "same likeliest id"),
        *("answers equal, alone", "batched", "alone as batched"),
    ]
    for model, by_dtype in results.items():
        for dtype, found in by_dtype.items():
            last = found["layers"][-1]
            counts = (found[key] for key in ("alone", "batched", "alone_and_batched"))
            yield [
                *(model, dtype),
                *(f"{last[key]:.1e}" for key in ("median", "worst", "logits")),
                f"{100 * last['likeliest']:.1f} %",
                *(f"{count} of {found['prompts']}" for count in counts),
            ]


def constrained_over_free(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """The rows of the documentation's table: the header, then the rows."""
    yield [
        *("model", "answers", "decoding", "without: exact match", "95 % interval"),
        *("constrained", "tasks within", "passes", "at most, for a task"),
    ]
    for model, by_form in results.items():
        for form, by_decoding in by_form.items():
            for decoding, ways in by_decoding.items():
                free, held = ways["free"], ways["constrained"]
                low, high = (100 * bound for bound in _interval(free))
                within = sum(
                    found["right"] / found["of"] >= free[task]["interval"][0]
                    for task, found in held.items()
                )
                ratios = [found["passes"] / free[task]["passes"] for task, found in held.items()]
                passes = (sum(found["passes"] for found in way.values()) for way in (held, free))
                more, less = passes
                yield [
                    *(model, form, decoding, f"{_percent(free):.1f} %", f"{low:.1f} - {high:.1f}"),
                    *(f"{_percent(held):.1f} %", f"{within} of {len(held)}"),
                    *(f"{more / less:.2f}x", f"{max(ratios):.2f}x"),
                ]


def _totals(by_task: Mapping[str, Any]) -> tuple[int, int]:
    right, of = (sum(found[key] for found in by_task.values()) for key in ("right", "of"))
    return right, of


def _percent(by_task: Mapping[str, Any]) -> float:
    right, of = _totals(by_task)
    return 100 * right / of


def _interval(by_task: Mapping[str, Any]) -> tuple[float, float]:
    return wilson_interval(*_totals(by_task))
