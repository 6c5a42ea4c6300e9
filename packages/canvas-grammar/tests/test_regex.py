"""Regular expressions mean what `re.fullmatch` says, or are refused by name."""

from __future__ import annotations

import re

import pytest
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.helpers import over_bytes, reads
from hypothesis import given, settings
from hypothesis import strategies as st

PATTERNS = [
    "abc", "a|b|", "a*b+c?", "(a|b){2,3}", "[a-c]x[^a-c]", r"\d\D\s\S\w\W", ".", "(?s).", "^a$",
    "^a|b$", r"\Aab\Z", "(?:^a|b)c?$", "a{0}", "a{,2}", "(?P<n>a)b", "(?i)aK", "(?i:k)s", "(?a)\\w",
    "[^\\W\\d]", "[\\]\\-^]", "é[à-ü]", "a(?#comment)b", "(?x) a b # c", "\\x41\\u00e9\\n\\t",
    "(a(b(c)?)?)?", "((a|b)*c){1,2}", "(?i)[^k-s]", "a*?b", "()", "", "[[]", "[a&&b]", r"\.\*",
]  # fmt: skip
TEXTS = [
    "", "a", "b", "c", "ab", "abc", "ac", "bc", "aab", "aa", "bb", "abab", "axb", "ax1", "k", "K",
    "\u212a", "\u017f", "ks", "aK", "ak", "AK", "Ks", "1a b_-", "1b\x1cc\xb2!", "\u0661", "é", "éà",
    "éz", "\n", "\t", " ", "]", "-", "^", "[", "&", "A\u00e9\n\t", "a\n", "_", "9", "\U0001f600",
    "acbc", "c", "cc", ".*", "z", "aac", "\x1f", "\x85",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_as_python_reads_it(pattern: str) -> None:
    found = over_bytes("regex", pattern)
    said = {text: reads(found, text.encode()) for text in TEXTS}
    assert said == {text: bool(re.fullmatch(pattern, text)) for text in TEXTS}


@st.composite
def patterns(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0:
        return draw(st.sampled_from(["a", "b", "[ab]", "[^a]", ".", ""]))
    kind = draw(st.integers(0, 4))
    one = draw(patterns(depth - 1))
    if kind == 0:
        return one
    if kind == 1:
        return one + draw(patterns(depth - 1))
    if kind == 2:
        return f"(?:{one}|{draw(patterns(depth - 1))})"
    return f"(?:{one}){draw(st.sampled_from(['*', '+', '?', '{2}', '{1,2}', '*?']))}"


@settings(max_examples=150)
@given(patterns(), st.lists(st.text("abc", max_size=6), min_size=5, max_size=5))
def test_any_expression(pattern: str, texts: list[str]) -> None:
    found = over_bytes("regex", pattern)
    for text in texts:
        assert reads(found, text.encode()) == bool(re.fullmatch(pattern, text)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(", "not a regular expression: missing"),
        ("*a", "not a regular expression: nothing to repeat"),
        ("a(?=b)", "lookahead"),
        ("a(?!b)", "lookahead"),
        ("(?<=a)b", "lookahead or lookbehind"),
        (r"(a)\1", "references to groups"),
        (r"(?P<x>a)(?P=x)", "references to groups"),
        (r"(a)?(?(1)b|c)", "conditions on groups"),
        (r"a\b", r"\b is supported only at the ends .*\(and \\b"),
        ("a^b", r"\^ is supported only at the ends"),
        ("a$b", r"\$ is supported only at the ends"),
        ("(a$)*", r"\$ is supported only at the ends"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("(?:a{1000}){1000}", "byte positions, at most 200000"),
        ("(" * 5000 + ")" * 5000, "nests too deeply"),
        ("[^\x01-\U0010ffff]", "no output at all"),
        (r"\0", "no output at all"),
        ("a{99999999999999999999}", "not a regular expression|byte positions"),
    ],
)
def test_refused(pattern: str, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        over_bytes("regex", pattern)


@pytest.mark.parametrize(
    ("choices", "text", "is_one"),
    [
        (["yes", "no", "yes"], "yes", True),
        (["a.b", "x"], "a.b", True),
        (["a.b", "x"], "axb", False),
        (["", "x"], "", True),
        ('["über", "日本"]', "日本", True),
    ],
)
def test_choice(choices: object, text: str, is_one: bool) -> None:
    assert reads(over_bytes("choice", choices), text.encode()) == is_one


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([], "choice is empty"),
        ("[", "choice: not JSON"),
        ("{}", "choice is a list of strings"),
        ([1], "1 is not a string"),
        (["a\0"], r"U\+0000"),
        (["\ud800"], "surrogate"),
        (["x" * 300_000], "characters long, at most 262144"),
    ],
)
def test_choices_that_are_refused(value: object, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        over_bytes("choice", value)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ConstraintError, match="no such constraint: poem"):
        over_bytes("poem", "{}")
