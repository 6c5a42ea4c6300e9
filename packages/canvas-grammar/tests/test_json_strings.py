"""Strings with patterns, lengths and exclusions together."""

from __future__ import annotations

import json
import re

import pytest
from canvas_grammar.grammar.json_strings import (
    FEW,
    LONGEST_COUNTED,
    StringFacts,
    string_language,
    string_tree,
)
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives
from hypothesis import given, settings
from hypothesis import strategies as st
from test_regex import patterns


def fits(facts: StringFacts, text: str) -> bool:
    return (
        facts.least <= len(text) <= (len(text) if facts.most is None else facts.most)
        and all(re.search(pattern.replace("$", r"\Z"), text) for pattern in facts.patterns)
        and not any(fits(excluded, text) for excluded in facts.excluded)
    )


def written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


ANCHORED = st.builds(
    lambda begin, middle, end: f"{begin}(?:{middle}){end}",
    st.sampled_from(["", "^", "^(?!a)", "^(?=.*b)", "(?!b)"]),
    patterns(),
    st.sampled_from(["", "$"]),
)  # fmt: skip
FACTS = st.builds(
    StringFacts,
    least=st.integers(0, 3),
    most=st.none() | st.integers(0, 6),
    patterns=st.lists(ANCHORED, max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(FACTS, st.lists(FACTS, max_size=2), st.lists(st.text("abc", max_size=6), max_size=6))
def test_everything_together(
    facts: StringFacts, excluded: list[StringFacts], texts: list[str]
) -> None:
    facts = StringFacts(facts.least, facts.most, facts.patterns, (), tuple(excluded))
    language = string_tree(facts)
    for text in [*texts, "", "a", "b", "ab", "abc", "aab", "bbbb"]:
        assert derives(language, written(text)) == fits(facts, text), text


def test_lengths_count_characters() -> None:
    two = string_tree(StringFacts(2, 2))
    for text in ("ab", "é😀", "\n\\", "\u0000\u0001"):
        assert derives(two, written(text)), text
    assert not derives(two, written("a")) and not derives(two, written("abc"))
    # No character is written in two ways.
    assert not derives(two, '"\\u000a\\u000a"') and not derives(two, '"\\u0061b"')


@pytest.mark.parametrize(
    ("facts", "least", "most"),
    [
        (StringFacts(most=65535), 0, LONGEST_COUNTED),
        (StringFacts(1, 65535), 1, LONGEST_COUNTED),
        (StringFacts(600, 65535), 600, 600),
        (StringFacts(most=65535, patterns=("^a+$",)), 1, LONGEST_COUNTED),
        (StringFacts(most=65535, patterns=("^a{600}a*$",)), 600, 600),
        (StringFacts(most=65535, patterns=("^a{0,600}$",)), 0, 600),
        (StringFacts(1, 65535, patterns=("a",)), 1, LONGEST_COUNTED),
        (StringFacts(excluded=(StringFacts(3, 65535),)), 0, 2),
        (StringFacts(most=900, excluded=(StringFacts(3, 10),)), 0, LONGEST_COUNTED),
    ],
)
def test_long_strings_are_narrowed(facts: StringFacts, least: int, most: int) -> None:
    """What is demanded is not."""
    language = string_tree(facts)
    for count in {0, 1, 2, LONGEST_COUNTED, 513, 600, 601, 900} - set(range(3, 11)):
        assert derives(language, written("a" * count)) == (least <= count <= most), count


def test_counted_strings_have_no_controls_but_short_ones() -> None:
    for most in (FEW, FEW + 1):
        language = string_tree(StringFacts(most=most))
        assert derives(language, written("\n\t")) and derives(language, written('"\\'))
        assert derives(language, written("\u0001")) == (most == FEW)


def test_impossible_facts_are_the_empty_language() -> None:
    assert string_language(StringFacts(3, 2)).empty
    assert string_language(StringFacts(3, excluded=(StringFacts(2),))).empty
    assert string_language(StringFacts(patterns=("a$b",))).empty


def test_a_line_feed_at_the_end() -> None:
    # Python's $ holds before it, and that of ECMA-262 does not.
    strict = string_tree(StringFacts(patterns=("^a$",)))
    assert derives(strict, '"a"') and not derives(strict, '"a\\n"')
    rest = string_tree(StringFacts(excluded=(StringFacts(patterns=("^a$",)),)))
    assert not derives(rest, '"a"') and not derives(rest, '"a\\n"') and derives(rest, '"b"')
    # A digit of Unicode is one for Python: neither offered as a digit nor as another character.
    for pattern in (r"^\d$", r"^\D$", r"^[^\d]$"):
        assert not derives(string_tree(StringFacts(patterns=(pattern,))), '"\u0661"')


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        (StringFacts(excluded=(StringFacts(formats=("email",)),)), "'email' cannot be excluded"),
        (StringFacts(patterns=("(",)), r"pattern '\(': the pattern is not a regular expression"),
        (StringFacts(patterns=(r"(a\b)*",)), "inside a repetition"),
    ],
)
def test_refused(facts: StringFacts, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        string_language(facts)
