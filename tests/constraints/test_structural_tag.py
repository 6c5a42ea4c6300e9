"""Structural tags as vLLM's tool parsers write them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.constraints.helpers import LIMITS, accepts, record
from vllm_dllm.constraints.grammar.structural_tag import structural_tag
from vllm_dllm.constraints.limits import ConstraintError

ARGUMENTS = record(a={"type": "integer", "minimum": 0, "maximum": 9})


def tag(name: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": ARGUMENTS, "style": "json", "excludes": []}
    return {"type": "tag", "begin": f"<call>{name}:", "content": content, "end": "</call>"}


def wrapped(given: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": given}


def separated(**options: bool) -> dict[str, Any]:
    tags = [tag("x"), tag("y")]
    return wrapped({"type": "tags_with_separator", "tags": tags, "separator": ";", **options})


CALL = '<call>{}:{{"a":1}}</call>'
X, Y = CALL.format("x"), CALL.format("y")


@pytest.mark.parametrize(
    ("options", "fit", "others"),
    [
        ({"at_least_one": True}, [X, Y, f"{X};{Y};{X}"], ["", X + Y, f"{X};"]),
        ({"at_least_one": False}, ["", X, f"{Y};{X}"], [";"]),
        ({"at_least_one": True, "stop_after_first": True}, [X, Y], ["", f"{X};{Y}"]),
    ],
)
def test_tags_with_a_separator(options: dict[str, bool], fit: list[str], others: list[str]) -> None:
    for text in fit:
        assert accepts("structural_tag", separated(**options), text), text
    for text in others:
        assert not accepts("structural_tag", separated(**options), text), text


def test_the_other_formats() -> None:
    word = {"type": "const_string", "value": "ab"}
    some = {"type": "or", "elements": [word, {"type": "regex", "pattern": "[0-9]+"}]}
    every = wrapped(
        {
            "type": "sequence",
            "elements": [
                {"type": "plus", "content": some},
                {"type": "optional", "content": {"type": "const_string", "value": "."}},
                {"type": "star", "content": {"type": "const_string", "value": "!"}},
            ],
        }
    )
    for text in ("ab", "ab12ab", "7.", "7!!", "ab.!"):
        assert accepts("structural_tag", every, text), text
    for text in ("", ".", "a", "ab..", "!ab"):
        assert not accepts("structural_tag", every, text), text


def test_several_ends() -> None:
    ends = wrapped({**tag("x"), "end": ["1", "2"]})
    assert accepts("structural_tag", ends, '<call>x:{"a":1}2')
    assert not accepts("structural_tag", ends, '<call>x:{"a":1}</call>')


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"type": "any_text"}, "any_text"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, "triggered_tags"),
        ({"type": "json_schema", "json_schema": True}, "strict"),
        ({"type": "json_schema", "json_schema": ARGUMENTS, "style": "xml"}, "style"),
        ({"type": "tag", "begin": "a", "content": {"type": "regex", "pattern": "a"}}, "end"),
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


def test_other_shapes_are_refused() -> None:
    for value in (3, {}, {"structures": [], "triggers": []}):
        with pytest.raises(ConstraintError, match="with a format"):
            structural_tag(value, LIMITS)
