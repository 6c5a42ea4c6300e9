"""States over tokens: every token, on every state, against the slow reader of bytes."""

from __future__ import annotations

from itertools import product

import pytest
from canvas_grammar.automaton.compiled import CompiledConstraint, Facts
from canvas_grammar.automaton.configurations import END_OF_TEXT, NO_STATE, START, Configurations
from canvas_grammar.automaton.pushdown import pushdown_tables
from canvas_grammar.automaton.rule_automata import rule_automata
from canvas_grammar.automaton.vocabulary import Vocabulary
from canvas_grammar.automaton.windows import window
from canvas_grammar.grammar.language import Node, either, literal, optional, repeat, sequence
from canvas_grammar.grammar.regex import regex
from canvas_grammar.grammar.rules import Both, Call, Rule, Without, WithoutFirst
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.helpers import LIMITS

END = 0
# Tokens that end several rules at once, begin several, or do both.
WORDS = [b"", b"a", b"b", b"c", b",", b"ab", b"bb", b"b,a", b"bb,", b"aab", b"c,", b"aa", b",,"]
VOCABULARY = Vocabulary.from_tokens(WORDS, [END])


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


def brackets() -> Node:
    """A list in a list, with an ambiguous middle."""
    rule = Rule("list")
    item = either([literal("c"), Call(rule), sequence(literal("c"), Call(rule))])
    items = sequence(item, repeat(sequence(literal(","), item), 0, None))
    rule.body = sequence(literal("a"), optional(items), literal("b"))
    return Call(rule)


def beside(words: str, other: str) -> Node:
    """Two rules that begin alike: after that one has two words, and one has one of them."""
    first = either([literal(word * 2) for word in words])
    rules = [Rule("two", sequence(literal("c"), first))]
    rules.append(Rule("one", sequence(literal("c"), literal(f"{other},"))))
    return either(map(Call, rules))


ALL = {
    "nested": nested(),
    "pairs": pairs(),
    "mutual": mutual(),
    "both": Both(regex("[ab]*c"), regex(".{2,3}")),
    "without": Without(regex("[abc]{1,3}"), regex("a*b?")),
    "both inside": sequence(literal("a"), Both(regex("b+"), regex("bb?")), literal("c")),
    "without both": Without(regex("[ab]+"), sequence(literal("a"), Both(regex("b*"), regex(".?")))),
    "called twice": sequence(nested(), literal(","), nested()),
    "brackets": brackets(),
    **{f"beside {other}": beside("ab", other) for other in "ab"},
}


def compiled(language: Node, depth: int = 20) -> Configurations:
    tables = pushdown_tables(rule_automata(language, LIMITS), VOCABULARY, LIMITS)
    met = Configurations(tables, depth)
    window(met, START, 6, 40)
    # What was met in one process is known in another one.
    return CompiledConstraint.pack(Facts(1, depth), met).configurations()


@pytest.mark.parametrize("name", ALL)
def test_every_short_sequence_of_tokens(name: str) -> None:
    found, checked = compiled(ALL[name]), 0
    for length in range(5):
        for tokens in product(range(1, len(WORDS)), repeat=length):
            state = START
            for token in tokens:
                state = found.after(state, token)
            text = b"".join(WORDS[token] for token in tokens).decode()
            ends = state != NO_STATE and found.after(state, END) == END_OF_TEXT
            assert ends == derives(ALL[name], text), (text, tokens)
            checked += ends
    assert checked


@pytest.mark.parametrize("name", ALL)
def test_moves_are_what_tokens_do(name: str) -> None:
    found = compiled(ALL[name], depth=5)
    classes = found.tables.class_of_token
    ahead, seen = [START], {START}
    while ahead:
        state = ahead.pop()
        moves = found.moves(state)
        assert len(set(moves.targets.tolist())) == len(moves.targets)
        leads = {int(c): int(t) for t, label in zip(moves.targets, moves.labels, strict=True)
                 for c in found.labels[label]}  # fmt: skip
        assert len(leads) == sum(len(found.labels[label]) for label in moves.labels)
        for token in range(len(WORDS)):
            expected = leads.get(int(classes[token]), NO_STATE)
            assert found.after(state, token) == expected, (state, token)
        new = set(leads.values()) - seen
        seen |= new
        ahead += sorted(new)
        # The distance is never too small, and from every state a text ends as soon as it says.
        nearest = min(found.distance[t] for t in leads.values())
        assert nearest + 1 <= found.distance[state] or state == END_OF_TEXT
    assert END_OF_TEXT in seen and len(seen) < 3000


def test_depth_bounds_nesting_and_every_state_ends_within_it() -> None:
    found = compiled(ALL["nested"], depth=3)
    state = START
    for _ in range(4):  # one list, and three that it calls
        state = found.after(state, 1)
    assert found.after(state, 1) == NO_STATE
    for _ in range(4):
        state = found.after(state, 2)
    assert found.after(state, END) == END_OF_TEXT


def test_distance_counts_tokens() -> None:
    found = compiled(ALL["nested"])
    assert found.distance[START] == 2, "ab and the end"
    inside = found.after(START, WORDS.index(b"aa"))
    if inside == NO_STATE:
        inside = found.after(found.after(START, WORDS.index(b"a")), WORDS.index(b"a"))
    # b, b, end: a token that ends both rules is not counted on.
    assert found.distance[inside] == 3


def test_a_rule_is_compiled_once() -> None:
    rule = Rule("name", regex("[a-z]{1,40}"))
    once = rule_automata(sequence(Call(rule)), LIMITS)
    often = rule_automata(sequence(*[Call(rule), literal(";")] * 50), LIMITS)
    assert often.states < once.states + 110


def test_long_endings_are_shared() -> None:
    """Also between rules: a word of up to 30 letters is the ending of one of up to 100."""
    rules = [Call(Rule("word", regex(f"[a-z]{{0,{most}}};"))) for most in (30, 70, 100)]
    options = [sequence(literal(str(n)), rule) for n, rule in enumerate(rules)]
    assert rule_automata(either(options), LIMITS).states < 100 + 10


def test_empty_languages() -> None:
    endless = Rule("endless")
    endless.body = sequence(literal("a"), Call(endless))
    empty = Both(literal("a"), literal("b")), WithoutFirst("x", literal("a")), Call(endless)
    for language in empty:
        with pytest.raises(ConstraintError, match="allows no output at all"):
            rule_automata(language, LIMITS)
    found = compiled(either([literal("b"), sequence(literal("a"), Call(endless))]))
    assert found.after(START, WORDS.index(b"a")) == NO_STATE
    assert found.after(found.after(START, WORDS.index(b"b")), END) == END_OF_TEXT
