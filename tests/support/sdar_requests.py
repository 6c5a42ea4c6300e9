"""What is asked of engines that serve SDAR, and what `transformers` answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.engine import greedy
from tests.support.reference_sdar import RULES, Answer, Reference, Rule

# Tokens of the prompt and tokens to generate: shorter and longer than a block, beginning and ending
# on its edges and inside of it.
SHAPES = (
    *((1, 5), (3, 13), (4, 8), (7, 1), (8, 33), (16, 24), (21, 17), (32, 40), (40, 30), (61, 21)),
    *((96, 12), (115, 20)),
)
SETTINGS = (
    Rule(),
    Rule(threshold=0.2),
    Rule(threshold=0.5, steps=2),
    Rule("LowConfidenceStatic"),
    Rule("LowConfidenceStatic", steps=3),
    Rule("Sequential", steps=2),
    Rule("Sequential"),
    Rule("EntropyBounded"),
    Rule("EntropyBounded", entropy_bound=6.0),
    Rule(threshold=0.3, steps=3),
    Rule("LowConfidenceStatic", steps=2),
    Rule("EntropyBounded", entropy_bound=3.0),
)
# Decisions closer than this may legitimately fall differently in another order of summation.
MARGIN = 3e-5


def reference_answers(model: Path, block: int, stops: dict[int, int]) -> list[Answer]:
    reference = Reference(model)
    return [
        reference.generate(prompt(n, length), count, rule, block, (stops[n],) if n in stops else ())
        for n, ((length, count), rule) in enumerate(zip(SHAPES, SETTINGS, strict=True))
    ]


def prompt(number: int, length: int) -> list[int]:
    return [(37 * i * i + 11 * i + number) % 290 for i in range(1, length + 1)]


def requests(model: Path, block: int) -> tuple[list[Answer], list[int], list[dict[str, Any]]]:
    """The answers that are wanted, those that no other order of summation may change, and what
    is asked; one of the long answers ends early, at its seventh token."""
    stops = {8: reference_answers(model, block, {})[8].tokens[6]}
    wanted = reference_answers(model, block, stops)
    robust = [n for n, answer in enumerate(wanted) if answer.margin > MARGIN]
    assert len(robust) >= len(SHAPES) - 2, "too many near ties to compare"
    assert {SETTINGS[n].name for n in robust} == set(RULES)
    asked = [
        {
            "prompt": prompt(n, length),
            "max_tokens": count,
            "stop": [stops[n]] if n in stops else [],
            "options": SETTINGS[n].options(),
        }
        for n, (length, count) in enumerate(SHAPES)
    ]
    return wanted, robust, asked


def parameters(asked: list[dict[str, Any]]) -> list[Any]:
    """The sampling parameters of `requests`."""
    return [
        greedy(
            request["max_tokens"],
            ignore_eos=True,
            stop_token_ids=request["stop"],
            **request["options"],
        )
        for request in asked
    ]


def assert_exact(
    name: str, engine: dict[str, Any], wanted: list[Answer], robust: list[int]
) -> None:
    """A child's answers of one engine are the wanted ones, and it preempted where it should."""
    assert (engine["preemptions"] > 0) == ("preempted" in name), name
    for answers in engine["answers"]:
        different = [n for n in robust if answers[n] != wanted[n].tokens]
        assert not different, (name, different)
