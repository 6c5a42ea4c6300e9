"""Chains that are put together from tables of their parts are those that `outlines_core` builds."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from canvas_grammar.automaton.byte_tables import END, SYMBOL, chain_table, expression_table
from canvas_grammar.automaton.graph import DEAD
from canvas_grammar.grammar.language import (
    Node,
    as_expression,
    either,
    literal,
    repeat,
    sequence,
)
from canvas_grammar.grammar.regex import regex
from canvas_grammar.grammar.rules import Call, Rule
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.helpers import LIMITS

MOST = 50_000
CALLED = Call(Rule("called", literal("x")))


def whole(node: Node) -> np.ndarray:
    """The table that `outlines_core` builds."""
    expression = as_expression(node, LIMITS, lambda _: rf"\x{SYMBOL:02x}\x01\x02")
    return expression_table(rf"(?:{expression})\x{SYMBOL:02x}\x{END:02x}", MOST)


def same(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two tables, all of whose states lead to an end, have the same texts."""
    seen, ahead = {(0, 0)}, [(0, 0)]
    for left, right in ahead:  # grows while it is read
        alive = one[left] != DEAD
        if not np.array_equal(alive, two[right] != DEAD):
            return False
        pairs = set(zip(one[left][alive].tolist(), two[right][alive].tolist(), strict=True))
        ahead += pairs - seen
        seen |= pairs
    return True


def member(random: Random) -> Node:
    name = "".join(random.choices("ab", k=random.randint(1, 3)))
    value = random.choice(
        [regex("[0-9]+"), regex('"[^"]*"'), CALLED, literal("t"), sequence(CALLED, literal(";"))]
    )
    return sequence(literal(f",{name}:"), value)


def chain(random: Random) -> Node:
    """Members that must or may come, some of them several times, and others of any number."""
    parts: list[Node] = []
    for _ in range(random.randint(3, 12)):
        counts = random.choice([(1, 1), (0, 1), (0, 1), (0, 7), (2, 5), (0, 30)])
        parts.append(repeat(member(random), *counts))
    if random.random() < 0.5:
        parts.append(repeat(either([member(random), literal(",c")]), 0, None))
    return sequence(*parts)


@pytest.mark.parametrize("seed", range(60))
def test_random_chains(seed: int) -> None:
    language = chain(Random(seed))
    table = chain_table(language, whole, MOST)
    if table is not None:
        assert same(table, whole(language))


@pytest.mark.parametrize("expression", ["(ab?){0,20}b", "(a*){3,20}b", "[0-9]{0,40}5"])
def test_where_the_end_of_a_part_is_not_clear(expression: str) -> None:
    language = regex(expression)
    table = chain_table(language, whole, MOST)
    assert table is None or same(table, whole(language))


def test_states_are_counted() -> None:
    with pytest.raises(ConstraintError, match="at most 100 are served"):
        chain_table(repeat(regex("[a-z]{5},"), 0, 50), whole, 100)
