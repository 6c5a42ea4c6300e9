"""What is asked of engines that serve Nemotron-Labs-Diffusion, and what the reference answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.reference_nemotron import MASK, RULES, Answer, Reference, Rule
from tests.support.sdar_requests import MARGIN

SETTINGS = (
    Rule(),
    Rule(threshold=0.2),
    Rule("LowConfidenceEven"),
    Rule(threshold=0.1, steps=3),
    Rule("LowConfidenceEven", steps=3),
    Rule("Leftmost"),
    Rule(threshold=0.5),
    Rule("Leftmost", steps=2),
)
# Every request has another rule than the one before it, and blocks end inside of answers.
TOKENS = (5, 13, 1, 16, 33, 24, 8, 21, 40, 30)


def lengths(block: int) -> list[int]:
    """Prompts of all lengths from a token to two blocks and one, or some of them; and long ones."""
    edge = range(1, 2 * block + 2)
    few = edge if len(edge) <= 20 else (1, 2, 15, 16, 31, 32, 33, 47, 48, 63, 64, 65)
    return [*few, 96, 115, 130]


def prompt(number: int, length: int) -> list[int]:
    """Any tokens; one of them in every other prompt is the mask's, which is a token like others."""
    found = [(37 * i * i + 11 * i + number) % 290 for i in range(1, length + 1)]
    if number % 2:
        found[length // 2] = MASK
    return found


def requests(model: Path, block: int) -> tuple[list[Answer], list[int], list[dict[str, Any]]]:
    """The answers that are wanted, those that no other order of summation may change, and what
    is asked; some answers end early, at the first of their tokens that stood nowhere before."""
    reference, wanted, asked = Reference(model), [], []
    for n, length in enumerate(lengths(block)):
        rule, count = SETTINGS[n % len(SETTINGS)], TOKENS[n % len(TOKENS)]
        given, stop = prompt(n, length), ()
        answer = reference.generate(given, count, rule, block)
        if n % 4 == 3 and count > 8:
            stop = (answer.tokens[6],)
            answer = reference.generate(given, count, rule, block, stop)
        wanted.append(answer)
        asked.append(
            {
                "prompt": given,
                "max_tokens": count,
                "stop": list(stop),
                "options": rule.options(),
            }
        )
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= len(wanted) - 2, "too many near ties to compare"
    assert {SETTINGS[n % len(SETTINGS)].name for n in robust} == set(RULES)
    assert any(
        len(answer.tokens) < one["max_tokens"] for answer, one in zip(wanted, asked, strict=True)
    )
    return wanted, robust, asked


def verifying(count: int) -> list[dict[str, Any]]:
    """Requests of `LinearSpec`, of any length."""
    return [
        {
            "prompt": prompt(n, 1 + n * 7 % 90),
            "max_tokens": 1 + n * 5 % 40,
            "stop": [],
            "options": {"diffusion_algorithm": "LinearSpec"},
        }
        for n in range(count)
    ]
