"""Rules, and the operations on languages, as `derivations` reads them."""

from __future__ import annotations

from random import Random

from canvas_grammar.grammar.language import either, literal, optional, repeat, sequence
from canvas_grammar.grammar.regex import regex
from canvas_grammar.grammar.rules import Behind, Both, Call, Rule, Without
from canvas_grammar_support.derivations import derives, random_text


def test_a_rule_may_call_itself() -> None:
    nested = Rule("nested")
    nested.body = sequence(literal("["), optional(Call(nested)), literal("]"))
    for text, inside in (("[]", True), ("[[[]]]", True), ("[[]", False), ("[][]", False)):
        assert derives(Call(nested), text) == inside
    random = Random(0)
    texts = {random_text(Call(nested), random) for _ in range(50)} - {None}
    assert {"[]", "[[]]"} <= texts and all(derives(Call(nested), text) for text in texts if text)


def test_operations() -> None:
    words, short = regex("[a-c]+"), regex("..?")
    assert derives(Both(words, short), "ab") and not derives(Both(words, short), "abc")
    assert derives(Without(words, short), "abc") and not derives(Without(words, short), "a")
    pairs = sequence(*(optional(literal(f",{name}")) for name in "abc"))
    members = either([literal(""), Behind(",", pairs)])
    for text, inside in (("", True), ("a,c", True), ("b", True), (",b", False), ("c,a", False)):
        assert derives(members, text) == inside, text
    assert derives(repeat(literal("ab"), 2, 3), "ababab")
