"""Grammars in GBNF and Lark's notation against other readers of them: xgrammar and Lark itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random

import pytest
from canvas_grammar.grammar.context_free import calls
from canvas_grammar.grammar.grammars import grammar
from canvas_grammar.grammar.language import Node
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, drawn
from canvas_grammar_support.grammars import GBNF, LARK
from canvas_grammar_support.helpers import LIMITS
from lark import Lark
from lark.exceptions import LarkError
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

LONGEST = 200  # characters; the readers are slow
# Terminals of which Lark's lexer finds a longer one than the rules ask for, see the documentation.
LEXED_OTHERWISE = {"sql", "turtle", "keyword"}
# `re` finds one match of a terminal: the first option, where there are several.
FIRST_MATCH = {"first_option"}
# xgrammar has no templates, and to it (?i) is about ASCII alone.
NOT_IN_XGRAMMAR = {"templates", "ignored_case"}


def samples(language: Node, count: int = 60) -> list[str]:
    texts = set(drawn(language, 3 * count, seed=1))
    return sorted(text for text in texts if len(text) <= LONGEST)[:count]


def changed(texts: list[str], random: Random) -> set[str]:
    """Texts with a character put in, left out or replaced, most of which break the grammar."""
    found = set()
    alphabet = sorted(set("".join(texts)) - {"\0"})
    for text in texts[:40]:
        for _ in range(4):
            place, char = random.randrange(len(text) + 1), random.choice(alphabet)
            end = text[place + 1 :]
            found.add(text[:place] + random.choice([char + text[place:], end, char + end]))
    return found


@pytest.mark.parametrize("name", GBNF)
def test_xgrammar_reads_gbnf_in_the_same_way(name: str) -> None:
    language, judge = grammar(GBNF[name], LIMITS), Grammar.from_ebnf(GBNF[name])
    texts = samples(language)
    assert len(texts) > 5
    assert [text for text in texts if not accepts(judge, text)] == []
    for text in changed(texts, Random(2)):
        assert derives(language, text) == accepts(judge, text), text


def lark_accepts(judge: Lark) -> Callable[[str], bool]:
    def answer(text: str) -> bool:
        try:
            judge.parse(text)
        except LarkError:
            return False
        return True

    return answer


@pytest.mark.parametrize("name", sorted(LARK.keys() - FIRST_MATCH))
def test_lark_reads_its_notation_in_the_same_way(name: str) -> None:
    """With the lexer that tries every length of a terminal; white space is not offered in front."""
    language = grammar(LARK[name], LIMITS)
    judge = lark_accepts(Lark(LARK[name], parser="earley", lexer="dynamic_complete"))
    texts = samples(language)
    assert len(texts) > 5
    assert [text for text in texts if not judge(text)] == []
    for text in changed(texts, Random(2)):
        assert judge(text) or not derives(language, text), text
        assert derives(language, text) or text[:1].isspace() or not judge(text), text


@pytest.mark.parametrize("lexer", ["dynamic", "contextual"])
@pytest.mark.parametrize("name", sorted(LARK.keys() - FIRST_MATCH - LEXED_OTHERWISE))
def test_the_other_parsers_of_lark_accept_what_is_offered(name: str, lexer: str) -> None:
    parser = "lalr" if lexer == "contextual" else "earley"
    judge = lark_accepts(Lark(LARK[name], parser=parser, lexer=lexer))
    assert [text for text in samples(grammar(LARK[name], LIMITS)) if not judge(text)] == []


@pytest.mark.parametrize("name", sorted(LARK.keys() - NOT_IN_XGRAMMAR))
def test_xgrammar_accepts_what_is_offered_of_lark(name: str) -> None:
    judge = Grammar.from_lark(LARK[name])
    assert [text for text in samples(grammar(LARK[name], LIMITS)) if not accepts(judge, text)] == []


def test_what_the_documentation_says_of_lexers() -> None:
    """Names that this package reads where Lark's parsers would not, by the same grammar."""
    language = grammar(LARK["sql"], LIMITS)
    joined = "SELECTaFROMb"
    assert derives(language, joined)
    assert not lark_accepts(Lark(LARK["sql"], parser="lalr"))(joined)
    assert accepts(Grammar.from_lark(LARK["sql"]), joined)


LARK_REFUSALS = {
    "": "undefined rule",
    "start: y": "'y' used but not defined",
    "start: start": "no text at all",
    'start: "a" start': "no text at all",
    'start: "a"\nstart: "b"': "more than once",
    "start: /a(?=b)/": "lookahead",
    "start: /(a)\\1/": "references to groups",
    'start: "x" A\nA: /^a/': "supported only at the ends",
    "start: /a*/": "zero-width",
    'start: A\nA: A "b"': "Recursion in terminal",
    "%declare A\nstart: A": "A is declared",
    "%import .secret.X\nstart: X": "import of secret",
    "%import secret.X\nstart: X": "import of secret",
    "%import .common.X\nstart: X": "import of common",
    'start: %json {"type": "object"}': "not a Lark grammar",
    "start: <|end|>": "not a Lark grammar",
}
GBNF_REFUSALS = {
    "root ::= x": "line 1, column 10: rule x is not defined",
    'a ::= "x"': "there is no rule root",
    'root ::= "a"\nroot ::= "b"': "line 2, column 1: rule root is defined twice",
    "root ::= root": "no text at all",
    'root ::= "a" root': "no text at all",
    'root ::= "a" (= "b") "b"': "lookahead",
    'root ::= TagDispatch(("a", x))\nx ::= "y"': "macros",
    'root ::= Token(3) "a"': "macros",
    'root[max_tokens=3] ::= "a"': "attributes",
    "root ::= [\\d]": r"\\d is not supported",
    "root ::= [z-a]": "above the upper",
    'root ::= "a"{3,2}': "above the upper",
    'root ::= "\\q"': "no such character",
    'root ::= "a': "not GBNF in line 1",
    "root ::= 'a'": "not GBNF in line 1",
    "root ::= " + "(" * 100 + '"a"' + ")" * 100: "nested deeper",
}


@pytest.mark.parametrize("text", LARK_REFUSALS)
def test_lark_grammars_that_are_refused(text: str) -> None:
    with pytest.raises(ConstraintError, match=LARK_REFUSALS[text]):
        grammar(text, LIMITS)


@pytest.mark.parametrize("text", GBNF_REFUSALS)
def test_gbnf_that_is_refused(text: str) -> None:
    with pytest.raises(ConstraintError, match=GBNF_REFUSALS[text]):
        grammar(text, LIMITS)


def test_ignored_text_stands_after_terminals_only() -> None:
    language = grammar('start: "a" "b"\n%ignore " "', LIMITS)
    for text, inside in (("ab", True), ("a  b ", True), (" ab", False), ("a\tb", False)):
        assert derives(language, text) == inside, text


def test_a_comment_ends_at_its_first_end() -> None:
    language = grammar(LARK["comments"], LIMITS)
    assert derives(language, "/* x */a;")
    assert not derives(language, "/* x */ y */a;")


# ------------------------------------- rules that begin and end with calls of each other


def random_grammar(random: Random) -> str:
    """Three rules of few parts each: with so few, most begin or end with each other."""
    names = ("root", "p", "q")

    def part() -> str:
        group = f'({random.choice(names)} | "b")'
        made = random.choice([*names, '"a"', '"b"', '"a"', group])
        return made + random.choice(["", "", "", "", "", "?", "*", "{1,2}"])

    def option() -> str:
        return " ".join(part() for _ in range(random.randint(1, 3)))

    rules = [" | ".join(option() for _ in range(random.randint(1, 3))) for _ in names]
    return "\n".join(f'{name} ::= {rule} | "a"' for name, rule in zip(names, rules, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_random_grammars_keep_their_language(seed: int) -> None:
    text = random_grammar(Random(seed))
    language, judge = grammar(text, LIMITS), Grammar.from_ebnf(text)
    texts = ("".join(chars) for size in range(6) for chars in product("ab", repeat=size))
    assert [t for t in texts if derives(language, t) != accepts(judge, t)] == [], text


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
    assert not set(calls(grammar(text, LIMITS)))
