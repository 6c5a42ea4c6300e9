"""What a quantized checkpoint loses against its original, on the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.tiny.tasks import Problem


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
