r"""Patterns mean what ECMA-262 says with the flag u, or are refused by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from canvas_grammar.grammar.json_strings import StringFacts, string_tree
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, drawn

TEXTS = ["", "a", "b", "c", "ab", "abc", "ac", "aab", "abab", "axb", "1", "a1", "-", "_", "/", '"',
         "]", "{", "}", "{}", "a{", "a{x}", "\\", "\n", "\t", "\u0001", "é", "É", "ß", "😀", "a😀b",
         " ", "a b", "foo bar", "foo", "barfoo", "foo.", "lucene.x", "builtin.", "x", "@@a", "a@b",
         "a--b", "a-b", "abcd", "\x1b", "\u00a0", "\ufeff", "A", "Z", "AZ", "\b",
         "k:v"]  # fmt: skip
# Python reads these in the same way, but for $ before a line feed and for classes of Unicode.
LIKE_PYTHON = [
    "a", "^a", "a$", "^a$", "^(a|b)+$", "a|^b", "^$|b", "(^a|b$)", "^(?:a|b{2})*$", "[a-c]", "[^a]",
    "[-a]", "[a-]", r"[\-\]\\]", r"\/", r"\.", r"\\", r"\x41", r"\u0041", "é", "😀", "^.$", "^..$",
    "a*?b", "a{2}", "^a{0,1}b", "^a{2,}", "(a)(b)", "()", "", "a||b", r"[\b]", r"\t|\n", r"^\s",
    "^(?!a)", "^(?=.*b)a", "^(?!@@)[@a-z]+$", "^(?!lucene\\.|builtin\\.).*", "a(?!b)", "a(?=b)",
    r"^([\da-z](?:(?!.*--)[\da-z-]*[\da-z])?)$", "^(?!.*b.*b)", "(?=a)(?=.*c)", r"^\S+$", "[[]",
    r"\bfoo\b", r"^\w+\b", r"\Boo", r"foo\b", "(^|-)b", "^a?^a", "(^a)*b", "(a$)+",
    "(?:^|a)b(?:$|a)",
    r"^[\w.]+$", "(?:a|b(?=c)){1,3}?c", "a(?!b|$)",
]  # fmt: skip
# Only readers without the flag u accept these.
TOLERATED = [r"\-", r"\_", r"\"", r"\'", r"\@", r"a\:", r"\%", "]", "}", "{", "a{", "a{x}", "{}",
             r"[\_a]", r"^\-.$", r"^[^\_]$", r"k\:v"]  # fmt: skip
ONLY_ECMA = {
    r"\p{L}": ["a", "é"],
    r"^\p{Lu}+$": ["A", "AZ", "É"],
    r"^\P{L}$": ["1", "-", "😀"],
    r"^[\p{Lowercase_Letter}1]$": ["a", "1", "ß"],
    r"^\p{General_Category=Nd}$": ["1"],
    r"^\u{1F600}$": ["😀"],
    r"^\ud83d\ude00$": ["😀"],
    r"^(?<name>a)$": ["a"],
    r"^\cJ$": ["\n"],
    r"^\p{ASCII}$": ["a", "\n"],
}


def languages(text: str):  # type: ignore[no-untyped-def]
    return string_tree(StringFacts(patterns=(text,)))


def offered(pattern: str) -> list[str]:
    language = languages(pattern)
    return [t for t in TEXTS if derives(language, json.dumps(t, ensure_ascii=False))]


@pytest.mark.parametrize("pattern", [*LIKE_PYTHON, *TOLERATED])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_as_python_reads_it(pattern: str) -> None:
    strict = re.sub(r"(?<!\\)\$", r"\\Z", pattern)
    found = {text for text in TEXTS if re.search(strict, text)}
    narrower = found - set(offered(pattern))
    assert set(offered(pattern)) <= found
    # What only one of the dialects matches is left out; so are halves of pairs without the flag.
    assert narrower <= {"é", "É", "ß", "\u2028", "\ufeff", "\x1b", "\u00a0", "😀", "a😀b"}
    if pattern in TOLERATED or "\\" not in pattern:
        assert narrower <= {"😀"}


@pytest.mark.parametrize(("pattern", "texts"), ONLY_ECMA.items())
def test_what_python_does_not_have(pattern: str, texts: list[str]) -> None:
    assert set(texts) <= set(offered(pattern))
    if pattern.startswith("^"):
        assert len(offered(pattern)) < 30


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        (r"\Aa", r"\\A, which ECMA-262 does not have"),
        (r"a\Z", r"\\Z, which ECMA-262 does not have"),
        (r"\a", r"\\a, which"),
        (r"\N{BULLET}", r"\\N, which"),
        (r"\01", r"\\0, which"),
        ("(?P<x>a)", r"Python's \(\?P"),
        ("(?i)a", "flags, such as"),
        ("(?i:a)", "flags, such as"),
        ("a{,3}", "{,n}, which only Python reads"),
        ("[]a]", r"\[\] or \[\^\], which Python reads in another way"),
        ("[^]a", r"\[\] or \[\^\]"),
        ("a++", "possessive"),
        ("a**", "nothing to repeat"),
        ("{2}", "nothing to repeat"),
        ("(?>a)", "atomic group"),
        ("(?#a)", "comment"),
        ("(?<=a)b", "lookbehind"),
        ("(?<!a)b", "lookbehind"),
        (r"(a)\1", "reference to a group"),
        (r"(?<x>a)\k<x>", "reference to a group"),
        (r"a\b.\b", r"\\b is supported only where"),
        (r"(?:a(?!b))*c", "an assertion inside a repetition"),
        ("(", r"missing \)"),
        (")", r"unbalanced \)"),
        ("[a", "missing ]"),
        ("a{3,2}", "out of order"),
        ("[b-a]", "out of order"),
        (r"[\w-a]", "begins or ends with a class"),
        (r"\p{Script=Greek}", "general categories such as"),
        (r"\p{Latin}", "general categories such as"),
        (r"\pL", "without a property"),
        (r"\u{110000}", "beyond Unicode"),
        (r"\ud800", "surrogate"),
        (r"\-\u{61}", "what the flag u forbids"),
        (r"\-😀", r"beyond U\+FFFF"),
        ("a\\", "backslash at the end"),
        ("^*", "repetition of an assertion"),
        ("(" * 5000, "nests too deeply"),
        ("a{9999999999}", "repetition of more than"),
    ],
)
def test_refused(pattern: str, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        languages(pattern)


def test_a_long_pattern_is_no_deep_tree() -> None:
    text = "ab" * 3000
    assert derives(languages(f"^{text}$"), f'"{text}"')


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_as_a_real_engine_reads_it() -> None:
    r"""Patterns with the flag u, and those that need to do without it without it."""
    cases = []
    for pattern in [*LIKE_PYTHON, *TOLERATED, *ONLY_ECMA]:
        # Random texts of an intersection are hard to find.
        count = 0 if re.search(r"\(\?[=!]|\\[bB]", pattern) else 20
        found = drawn(languages(pattern), count)
        texts = [*map(json.loads, found), *offered(pattern)]
        cases.append([pattern, "" if pattern in TOLERATED else "u", texts])
    script = (
        "const cases = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "console.log(JSON.stringify(cases.flatMap(([p, f, texts]) =>"
        " texts.filter(t => !new RegExp(p, f).test(t)).map(t => [p, t]))))"
    )
    ran = subprocess.run(
        ["node", "-e", script], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    assert json.loads(ran.stdout) == []
