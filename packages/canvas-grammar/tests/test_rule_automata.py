"""Automata that call each other accept what the slow reader of languages derives."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from canvas_grammar.automaton.graph import DEAD
from canvas_grammar.automaton.rule_automata import RuleAutomata, rule_automata
from canvas_grammar.grammar.language import Node, either, literal, optional, repeat, sequence
from canvas_grammar.grammar.regex import regex
from canvas_grammar.grammar.rules import Both, Call, Rule, Without, WithoutFirst
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.helpers import LIMITS


def accepts(automata: RuleAutomata, text: bytes) -> bool:
    """Read byte by byte with all possible stacks."""
    calls: dict[int, list[tuple[int, int]]] = {}
    for caller, start, back in automata.calls.tolist():
        calls.setdefault(caller, []).append((start, back))

    def closed(found: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
        ahead = list(found)
        while ahead:
            *stack, state = ahead.pop()
            more = [(*stack, back, start) for start, back in calls.get(state, ())]
            if automata.accepting[state] and stack:
                more.append(tuple(stack))
            ahead += [c for c in more if c not in found]
            found |= set(more)
        return found

    now = closed({(automata.start,)})
    for byte in text:
        now = closed({(*c[:-1], int(automata.next[c[-1], byte])) for c in now
                      if automata.next[c[-1], byte] != DEAD})  # fmt: skip
    return any(len(c) == 1 and automata.accepting[c[0]] for c in now)


def nested() -> Node:
    rule = Rule("nested")
    rule.body = sequence(literal("a"), optional(Call(rule)), literal("b"))
    return Call(rule)


def pairs() -> Node:
    chain = sequence(*(optional(literal(f",{name}")) for name in "abc"))
    return sequence(either([literal(""), WithoutFirst(",", chain)]), literal(","))


def mutual() -> Node:
    one, two = Rule("one"), Rule("two")
    one.body = sequence(literal("a"), repeat(Call(two), 0, 2))
    two.body = either([literal("b"), sequence(literal("c"), Call(one), literal(","))])
    return Call(one)


LANGUAGES = {
    "nested": nested(),
    "pairs": pairs(),
    "mutual": mutual(),
    "both": Both(regex("[ab]*c"), regex(".{2,3}")),
    "without": Without(regex("[abc]{1,3}"), regex("a*b?")),
    "both inside": sequence(literal("a"), Both(regex("b+"), regex("bb?")), literal("c")),
    "without both": Without(regex("[ab]+"), sequence(literal("a"), Both(regex("b*"), regex(".?")))),
    "called twice": sequence(nested(), literal(","), nested()),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_short_text(name: str) -> None:
    language = LANGUAGES[name]
    automata = rule_automata(language, LIMITS)
    found = 0
    for length in range(6):
        for letters in product("abc,", repeat=length):
            text = "".join(letters)
            assert accepts(automata, text.encode()) == derives(language, text), text
            found += derives(language, text)
    assert found, "a language without short texts tests nothing"


def test_a_rule_is_compiled_once() -> None:
    rule = Rule("name", regex("[a-z]{1,40}"))
    once = rule_automata(sequence(Call(rule)), LIMITS)
    often = rule_automata(sequence(*[Call(rule), literal(";")] * 50), LIMITS)
    assert often.states < once.states + 110


def test_long_endings_are_shared() -> None:
    """Also between rules: a word of up to 30 letters is the ending of one of up to 100."""
    rules = [Call(Rule("word", regex(f"[a-z]{{0,{most}}};"))) for most in (30, 70, 100)]
    automata = rule_automata(
        either([sequence(literal(str(n)), r) for n, r in enumerate(rules)]), LIMITS
    )
    assert automata.states < 100 + 10
    for first, most in enumerate((30, 70, 100)):
        for count in (0, most, most + 1):
            text = f"{first}{'a' * count};".encode()
            assert accepts(automata, text) == (count <= most)


def test_empty_languages() -> None:
    endless = Rule("endless")
    endless.body = sequence(literal("a"), Call(endless))
    for language in (
        Call(endless),
        Both(literal("a"), literal("b")),
        WithoutFirst("x", literal("a")),
    ):
        with pytest.raises(ConstraintError, match="allows no output at all"):
            rule_automata(language, LIMITS)
    automata = rule_automata(either([literal("b"), sequence(literal("a"), Call(endless))]), LIMITS)
    assert accepts(automata, b"b") and (automata.next[automata.start] != DEAD).sum() == 1
    assert not len(automata.calls) and automata.states == np.unique(automata.next).size
