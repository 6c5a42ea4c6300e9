"""Rules that begin and end with calls of themselves and each other, against xgrammar."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from canvas_grammar.grammar.context_free import _Side, calls, cycles, reachable
from canvas_grammar.grammar.ebnf import ebnf
from canvas_grammar.grammar.language import Node
from canvas_grammar.grammar.rules import Rule
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.helpers import LIMITS
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

NAMES = ("root", "p", "q")
TEXTS = ["".join(chars) for size in range(6) for chars in product("ab", repeat=size)]


def random_grammar(random: Random) -> str:
    """Three rules of few parts each: with so few, most begin or end with each other."""

    def part() -> str:
        group = f'({random.choice(NAMES)} | "b")'
        made = random.choice([*NAMES, '"a"', '"b"', '"a"', group])
        return made + random.choice(["", "", "", "", "", "?", "*", "{1,2}"])

    def option() -> str:
        return " ".join(part() for _ in range(random.randint(1, 3)))

    rules = [" | ".join(option() for _ in range(random.randint(1, 3))) for _ in NAMES]
    return "\n".join(f'{name} ::= {rule} | "a"' for name, rule in zip(NAMES, rules, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_random_grammars_keep_their_language(seed: int) -> None:
    text = random_grammar(Random(seed))
    language = ebnf(text, LIMITS)
    side = _Side(mirrored=False)
    rules = reachable(Rule("whole", language))
    assert not cycles({rule: side.edge(rule.body) for rule in rules})
    judge = Grammar.from_ebnf(text)
    assert [t for t in TEXTS if derives(language, t) != accepts(judge, t)] == [], text


def nested(text: str) -> set[Rule]:
    """The rules that are still called."""
    language = ebnf(text, LIMITS)
    return set(calls(language))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= root "a" | "b"',
        'root ::= "a" root | "b"',
        'root ::= a\na ::= b "x" | "1"\nb ::= a "y" | "2"',
        'root ::= a\na ::= "x" b | "1"\nb ::= "y" a | "2"',
        'root ::= item | root "," item\nitem ::= [a-z]+',
    ],
)
def test_repetition_calls_nothing(text: str) -> None:
    """So lists of any length take no place of a stack, however they are written."""
    assert not nested(text)


def test_only_what_nests_is_called() -> None:
    text = """root ::= sum
sum ::= sum "+" product | product
product ::= product "*" atom | atom
atom ::= [0-9] | "(" sum ")"
"""
    called = nested(text)
    assert len(called) == 1
    assert set(reachable(next(iter(called)))) == called


def deep(language: Node) -> bool:
    return derives(language, "(" * 20 + "1" + ")" * 20)


def test_nesting_stays() -> None:
    language = ebnf('root ::= "1" | "(" root ")"', LIMITS)
    assert deep(language) and not derives(language, "((1)")
