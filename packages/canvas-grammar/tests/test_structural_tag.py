"""Structural tags as vLLM's tool parsers write them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from canvas_grammar.grammar.structural_tag import structural_tag
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, drawn
from canvas_grammar_support.helpers import LIMITS, record
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as judged

ARGUMENTS = record(a={"type": "integer", "minimum": 0, "maximum": 9})


NUMBER = {"type": "regex", "pattern": "[0-9]+"}
TEXT: dict[str, Any] = {"type": "any_text"}


def digits(begin: str, end: Any, content: dict[str, Any] = NUMBER) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAG = digits("<a>", "</a>")
TAGS = [TAG, digits("<ab>", "</ab>")]
TRIGGERED: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<a"], "tags": TAGS}


def dispatch(**options: bool) -> dict[str, Any]:
    rules = [["<a", {"type": "regex", "pattern": ">[0-9]"}], ["a>", NUMBER]]
    return {"type": "dispatch", "rules": rules, **options}


def wrapped(given: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": given}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"type": "token", "token": 3}, "format token is"),
        ({"type": "any_tokens"}, "any_tokens"),
        ({"type": "any_text", "max_tokens": 3}, "max_tokens"),
        ({"type": "json_schema", "json_schema": ARGUMENTS, "style": "x"}, "style x is not"),
        ({"type": "json_schema", "json_schema": ARGUMENTS, "excludes": ["a"]}, "excludes"),
        ({"type": "json_schema", "json_schema": {"type": "x"}}, "type"),
        ({"type": "tag", "begin": "a", "content": {"type": "regex", "pattern": "a"}}, "end"),
        ({**TAG, "begin": {"type": "token", "token": 3}}, "a text is expected"),
        ({**TAG, "content": {"type": "any_text"}, "end": ""}, "needs an end"),
        ({**TRIGGERED, "triggers": ["<x"]}, "one of the triggers"),
        ({**TRIGGERED, "triggers": ["<a", "<a>"]}, "one of the triggers"),
        ({**TRIGGERED, "triggers": [""]}, "needs an end or a trigger"),
        ({**TRIGGERED, "tags": []}, "list of formats of type tag"),
        ({"type": "dispatch", "rules": [["a"]]}, "pairs"),
        ({"type": "repeat", "min": -1, "max": 2, "content": TAG}, "numbers"),
        ({"type": "const_string", "value": 3}, "a text"),
        ({"type": "or", "elements": 3}, "list"),
        (3, "format"),
    ],
)
def test_refused_by_name(given: Any, complaint: str) -> None:
    with pytest.raises(ConstraintError, match=complaint):
        structural_tag(wrapped(given), LIMITS)


def test_deep_formats_are_refused() -> None:
    deep: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(100):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(ConstraintError, match="deeper"):
        structural_tag(wrapped(deep), LIMITS)


WORD = {"type": "const_string", "value": "ab"}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": "x"}
SCHEMA = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0}, "style": "json"}
FREE = {
    "triggered": TRIGGERED,
    "at least one": {**TRIGGERED, "at_least_one": True},
    "stop": {**TRIGGERED, "stop_after_first": True},
    "exactly one": {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
    "excludes": {**TRIGGERED, "excludes": ["1x", "</"]},
    "overlaps": {**TRIGGERED, "triggers": ["<a", "b<"], "tags": [TAG, digits("b<1", "e")]},
    "ends alike": {**TRIGGERED, "triggers": ["a", "<a"], "tags": [digits("a<", "e"), TAG]},
    "repeats itself": {**TRIGGERED, "triggers": ["aa"], "tags": [digits("aa", "1")]},
    "text": TEXT,
    "without": {**TEXT, "excludes": ["a>", "<"]},
    "short": {**TEXT, "max_chars": 3, "excludes": ["aa"]},
    "before": {"type": "sequence", "elements": [TEXT, TAG]},
    "ended": digits("<a>", ["</a>", "b"], TEXT),
    "ended inside": digits("<ab>", "b", {"type": "sequence", "elements": [TEXT, NUMBER, TEXT]}),
    "begin is empty": digits("", "</a>", TEXT),
    "nested": digits("b", "b>", TRIGGERED),
    "dispatch": dispatch(),
    "dispatch once": dispatch(loop=False),
    "repeat": {"type": "repeat", "min": 1, "max": 2, "content": TAG},
    "no end": {"type": "repeat", "min": 1, "max": -1, "content": TAG},
    "grammar": {"type": "grammar", "grammar": 'root ::= "<" root ">" | "a"'},
    "separated": {**SEPARATED, "at_least_one": True},
    "separated or none": {**SEPARATED, "at_least_one": False},
    "first of separated": {**SEPARATED, "at_least_one": True, "stop_after_first": True},
    "repeated": {"type": "sequence", "elements": [
        {"type": "plus", "content": {"type": "or", "elements": [WORD, NUMBER]}},
        {"type": "optional", "content": {"type": "const_string", "value": ">"}},
        {"type": "star", "content": {"type": "const_string", "value": "e"}},
    ]},
    "several ends": digits("<a>", ["e", "</a>"]),
    "schema": digits("<a>", "</a>", SCHEMA),
}  # fmt: skip


@pytest.mark.parametrize("name", FREE)
def test_xgrammar_reads_free_text_in_the_same_way(name: str) -> None:
    language = structural_tag(wrapped(FREE[name]), LIMITS)
    judge = Grammar.from_structural_tag(wrapped(FREE[name]))
    random = Random(3)
    pieces = ["<a", ">", "a>", "1", "</a>", "<ab>", "</ab>", "b", "<", "x", "a", "e", "</", "b>"]
    for _ in range(400):
        text = "".join(random.choices(pieces, k=random.randint(0, 6)))
        assert derives(language, text) == judged(judge, text), text
    for text in drawn(language, 40):
        assert judged(judge, text), text


def test_a_place_in_a_tag_ends_no_outer_one() -> None:
    """Narrower than xgrammar: free text holds the end of no tag around it."""
    inner = digits("<i>", "</i>", TEXT)
    language = structural_tag(wrapped(digits("<o>", "</o>", inner)), LIMITS)
    assert derives(language, "<o><i>x</i></o>")
    assert not derives(language, "<o><i></o></i></o>")


def test_the_form_with_structures() -> None:
    pair = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
    old = {"type": "structural_tag", "structures": [pair], "triggers": ["<a"]}
    language = structural_tag(old, LIMITS)
    for text, inside in (("", True), ("x<a>1</a>y", True), ("<a", False), ("<a>x</a>", False)):
        assert derives(language, text) == inside, text
    with pytest.raises(ConstraintError, match="begin, schema and end"):
        structural_tag({**old, "structures": [{"begin": "<a>", "end": "</a>"}]}, LIMITS)


def test_other_shapes_are_refused() -> None:
    for value in (3, {}, {"structures": []}):
        with pytest.raises(ConstraintError, match="with a format"):
            structural_tag(value, LIMITS)
