"""Older drafts and documents inside documents: read as they say, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from canvas_grammar_support.helpers import record
from canvas_grammar_support.json_languages import offered, offers, refusal

DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
NULL, STRING = {"type": "null"}, {"type": "string"}
TREE = {"$dynamicAnchor": "t", "type": "object", "properties": {"a": {"$dynamicRef": "#t"}}}


ORDINARY = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/definitions/a"},
        "b": {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2},
        "c": {"type": "integer", "minimum": 0, "maximum": 9},
        "d": {"anyOf": [STRING, {"type": "boolean"}]},
    },
    "required": ["a", "b", "c", "d"],
    "additionalProperties": False,
    "definitions": {"a": {"type": "string", "maxLength": 3}},
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("change", [str, lambda name: name.rstrip("#"),
                                    lambda name: name.replace("http:", "https:")])  # fmt: skip
def test_what_all_drafts_say_is_read_as_before(draft: int, change: Any) -> None:
    schema = {"$schema": change(DRAFTS[draft])} | ORDINARY
    good = '{"a":"x","b":["x",1],"c":7,"d":true}'
    assert offers(schema, good)
    offered({"$schema": DRAFTS[draft]} | ORDINARY, good)


@pytest.mark.parametrize(
    ("bounds", "values"),
    [
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 5}, "3 4 5"),
        ({"minimum": 2, "exclusiveMinimum": False, "maximum": 5}, "2 3 4 5"),
        ({"minimum": 2, "maximum": 5, "exclusiveMaximum": True}, "2 3 4"),
        ({"minimum": 2, "maximum": 5, "exclusiveMaximum": False}, "2 3 4 5"),
    ],
)
def test_exclusive_bounds_of_draft_04_are_flags(bounds: dict[str, Any], values: str) -> None:
    numbers = [str(n) for n in range(8)]
    for kind in ("integer", "number"):
        schema = {"$schema": DRAFTS[4], "type": kind} | bounds
        assert offered(schema, *numbers) == values
    for draft in (6, 7, 2019, 2020):
        schema = {"$schema": DRAFTS[draft], "type": "integer"} | bounds
        assert "is a number" in refusal(schema)


@pytest.mark.parametrize(
    ("draft", "schema", "complaint"),
    [
        (4, {"type": "integer", "minimum": 3, "exclusiveMinimum": 2}, "exclusiveMinimum is true"),
        (4, {"oneOf": [record(a={"const": 1}), record(a={"const": 2})]}, "allows no value"),
        (7, {"type": "array", "prefixItems": [NULL], "items": STRING}, "prefixItems beside items"),
        (2019, {"prefixItems": [NULL], "items": STRING}, "$schema says draft-2019-09"),
        (2020, {"type": "array", "items": [NULL, STRING]}, "items is one schema"),
        (2019, {"$recursiveRef": "#"}, "$recursiveRef # leads back"),
    ],
)  # fmt: skip
def test_what_an_older_draft_reads_in_another_way_is_refused(
    draft: int, schema: dict[str, Any], complaint: str
) -> None:
    assert complaint in refusal({"$schema": DRAFTS[draft]} | schema)


def test_what_an_older_draft_has_not_only_leaves_out() -> None:
    """In draft-04 ``const`` says nothing: obeyed, it offers less; denied, it would offer more."""
    old = {"$schema": DRAFTS[4]}
    assert offered(old | {"type": "integer", "const": 1}, "1", "2") == "1"
    assert "allows no value" in refusal(old | {"type": "integer", "not": {"const": 1}})
    assert offered(old | {"type": "integer", "enum": [2.0]}, "2", "2.0") == "2"
    twice = {"$schema": DRAFTS[6], "contains": NULL, "minContains": 0, "type": "array"}
    assert offered(twice, "[]", "[null]") == "[null]"


@pytest.mark.parametrize(
    "name", ["http://json-schema.org/draft-03/schema#", "https://example.org/mine", "draft-07", 7]
)
def test_other_dialects_are_refused(name: Any) -> None:
    assert f"$schema {name} is not supported" in refusal({"$schema": name} | NULL)
    assert "$.a: $schema" in refusal(record(a={"$schema": name} | NULL))


D4, D7 = {"$schema": DRAFTS[4]}, {"$schema": DRAFTS[7]}
STRICT = {"$schema": DRAFTS[4], "type": "integer", "minimum": 1, "exclusiveMinimum": True}
OUTER: dict[str, Any] = {"$id": "https://example.org/outer", "$defs": {"A": STRING}}
DEEP = {"$id": "deep", "$defs": {"A": {"type": "boolean"}}, "$ref": "#/$defs/A"}
MIDDLE = {"$id": "item", "$defs": {"A": NULL}} | record(b={"$ref": "#/$defs/A"}, d=DEEP)
LIST = {"$id": "list"} | record(v=NULL)
LIST["properties"]["next"] = {"$ref": "#"}
NAMED_4 = {"id": "x", "definitions": {"A": STRING, "B": {"$ref": "#/definitions/A"}}}
UNNAMED_4 = {"$id": "x", "definitions": {"A": STRING}} | record(b={"$ref": "#/definitions/A"})


def option(name: str, value: str) -> dict[str, Any]:
    return {"$id": name, "$defs": {"A": {"const": value}}} | record(k={"$ref": "#/$defs/A"})


# By what is said: the schema, texts that it offers, and texts that it does not.
OFFERED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "$recursiveRef is of a document": (
        {"$schema": DRAFTS[2019], "$recursiveAnchor": True, "type": "object",
         "properties": {"a": {"$recursiveRef": "#"}}, "required": []},
        ['{"a":{"a":{}}}'], ['{"a":1}']),
    "$dynamicRef": (TREE, ['{"a":{"a":{}}}'], ['{"a":1}']),
    "$anchor": ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}},
                ["null"], ["1"]),
    "a metaschema": ({"$ref": f"{DRAFTS[7]}/definitions/nonNegativeInteger"},
                     ["0"], ["-1", '"x"']),
    "the draft of a part": (record(a=STRICT), ['{"a":2}', '{"a":3}'], ['{"a":0}', '{"a":1}']),
    "the draft of an option": ({"type": "object", "anyOf": [record(a=STRICT)]},
                               ['{"a":2}'], ['{"a":1}']),
    "properties with names of keywords": (
        {"properties": {"$schema": NULL, "$id": NULL, "default": {"$ref": "#/$defs/a"}},
         "required": ["default"], "$defs": {"a": NULL}}, ['{"$id":null,"default":null}'], []),
    "documents in documents": (OUTER | record(a={"$ref": "#/$defs/A"}, m=MIDDLE),
                               ['{"a":"x","m":{"b":null,"d":true}}'],
                               ['{"a":"x","m":{"b":"x","d":true}}']),
    "the root of a document": (record(a=LIST), ['{"a":{"v":null,"next":{"v":null}}}'],
                               ['{"a":{"v":null,"next":{"a":{"v":null}}}}']),
    "oneOf of documents": ({"oneOf": [option("x", "x"), option("y", "y")],
                            "$defs": {"A": {"const": "z"}}}, ['{"k":"x"}', '{"k":"y"}'],
                           ['{"k":"z"}']),
    "an $id that is only a mark": (
        D7 | {"definitions": {"A": NULL}}
        | record(a={"$id": "#mark"} | record(b={"$ref": "#/definitions/A"})),
        ['{"a":{"b":null}}'], []),
    "an $id that some tools write": (record(a={"$id": "#/properties/a"} | STRING),
                                     ['{"a":"x"}'], ['{"a":1}']),
    "id of draft-04": (
        D4 | {"definitions": {"A": NULL, "x": NAMED_4}}
        | record(a={"$ref": "#/definitions/x/definitions/B"}), ['{"a":"x"}'], ['{"a":null}']),
    "$id says nothing in draft-04": (D4 | {"definitions": {"A": NULL}} | record(a=UNNAMED_4),
                                     ['{"a":{"b":null}}'], ['{"a":{"b":"x"}}']),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERED)
def test_drafts_and_documents_are_read_as_they_say(name: str) -> None:
    schema, good, bad = OFFERED[name]
    assert offered(schema, *good, *bad) == " ".join(good)


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (TREE | {"$defs": {"x": {"$id": "x", "$dynamicAnchor": "t", "type": "null"}}},
         "only one schema has a $dynamicAnchor"),
        ({"$ref": "https://example.org/x"}, "is not supported"),
        (record(a=D4 | {"minimum": 1}, b=D7 | {"exclusiveMinimum": True}), "is a number"),
        ({"oneOf": [option("x", "x"), option("y", "x")]}, "allows no value"),
    ],
    ids=["two anchors", "another document", "a flag of draft-04", "the same constant"],
)  # fmt: skip
def test_what_is_refused(schema: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(schema)


@pytest.mark.parametrize("draft", [6, 7, 2019, 2020])
def test_a_reference_stays_in_the_document_that_it_is_in(draft: int) -> None:
    names = "definitions" if draft < 2019 else "$defs"
    part = {"$id": "item", names: {"A": NULL}} | record(b={"$ref": f"#/{names}/A"})
    schema = {
        "$schema": DRAFTS[draft],
        "$id": "https://example.org/outer",
        names: {"A": STRING, "item": part},
    } | record(a={"$ref": f"#/{names}/A"}, c={"$ref": f"#/{names}/item"}, d=part)
    good = '{"a":"x","c":{"b":null},"d":{"b":null}}'
    bad = '{"a":"x","c":{"b":"x"},"d":{"b":"x"}}'
    assert offered(schema, good, bad) == good
