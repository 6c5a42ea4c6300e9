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


# ---- $schema


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


def test_recursive_references_are_those_of_a_document() -> None:
    schema = {"$schema": DRAFTS[2019], "$recursiveAnchor": True} | {
        "type": "object", "properties": {"a": {"$recursiveRef": "#"}}, "required": []}  # fmt: skip
    assert offered(schema, '{"a":{"a":{}}}', '{"a":1}') == '{"a":{"a":{}}}'
    tree = {"$dynamicAnchor": "t", "type": "object", "properties": {"a": {"$dynamicRef": "#t"}}}
    assert offered(tree, '{"a":{"a":{}}}', '{"a":1}') == '{"a":{"a":{}}}'
    other = {"$defs": {"x": {"$id": "x", "$dynamicAnchor": "t", "type": "null"}}}
    assert "only one schema has a $dynamicAnchor" in refusal(tree | other)


def test_anchors_and_metaschemas_are_followed_and_nothing_else() -> None:
    named = {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}
    assert offered(named, "null", "1") == "null"
    count = {"$ref": f"{DRAFTS[7]}/definitions/nonNegativeInteger"}
    assert offered(count, "0", "-1", '"x"') == "0"
    assert "is not supported" in refusal({"$ref": "https://example.org/x"})


@pytest.mark.parametrize(
    "name", ["http://json-schema.org/draft-03/schema#", "https://example.org/mine", "draft-07", 7]
)
def test_other_dialects_are_refused(name: Any) -> None:
    assert f"$schema {name} is not supported" in refusal({"$schema": name} | NULL)
    assert "$.a: $schema" in refusal(record(a={"$schema": name} | NULL))


def test_the_draft_holds_for_a_part_of_a_schema() -> None:
    """As in vLLM's schema of all tools, which holds the schemas of each."""
    inner = {"$schema": DRAFTS[4], "type": "integer", "minimum": 1, "maximum": 3}
    flagged = inner | {"exclusiveMinimum": True}
    assert offered(record(a=flagged), *(f'{{"a":{n}}}' for n in range(5))) == '{"a":2} {"a":3}'
    several = {"type": "object", "anyOf": [record(a=flagged)]}
    assert offered(several, '{"a":1}', '{"a":2}') == '{"a":2}'
    strict = {"$schema": DRAFTS[7], "exclusiveMinimum": True}
    assert "is a number" in refusal(record(a=inner, b=strict))


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"properties": {"$schema": NULL, "$id": NULL, "default": {"$ref": "#/$defs/a"}},
              "required": ["default"], "$defs": {"a": NULL}}  # fmt: skip
    assert offered(schema, '{"$id":null,"default":null}')


# ---- $id


def inner(name: str = "item", **more: Any) -> dict[str, Any]:
    return {"$id": name, "$defs": {"A": NULL}} | record(b={"$ref": "#/$defs/A"}) | more


OUTER: dict[str, Any] = {"$id": "https://example.org/outer", "$defs": {"A": STRING}}


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


def test_a_document_in_a_document_in_a_document() -> None:
    deep = {"$id": "deep", "$defs": {"A": {"type": "boolean"}}, "$ref": "#/$defs/A"}
    schema = OUTER | record(a={"$ref": "#/$defs/A"}, m=inner(properties={
        "b": {"$ref": "#/$defs/A"}, "d": deep}))  # fmt: skip
    good = '{"a":"x","m":{"b":null,"d":true}}'
    assert offered(schema, good, '{"a":"x","m":{"b":"x","d":true}}') == good


def test_its_root_is_the_part() -> None:
    schema = record(a={"$id": "list", "type": "object", "properties": {
        "next": {"$ref": "#"}, "v": NULL}, "required": ["v"]})  # fmt: skip
    good = '{"a":{"next":{"v":null},"v":null}}'
    assert offered(schema, good, '{"a":{"next":{"a":{"v":null}},"v":null}}') == good


def test_what_counts_for_one_of_is_the_part_s_definition() -> None:
    def option(value: str) -> dict[str, Any]:
        return {"$id": value, "$defs": {"A": {"const": value}}} | record(k={"$ref": "#/$defs/A"})

    schema = {"oneOf": [option("x"), option("y")], "$defs": {"A": {"const": "z"}}}
    assert offered(schema, '{"k":"x"}', '{"k":"y"}', '{"k":"z"}') == '{"k":"x"} {"k":"y"}'
    schema["oneOf"][1]["$defs"]["A"]["const"] = "x"
    assert "allows no value" in refusal(schema)


def test_a_name_may_be_only_a_mark() -> None:
    """The schemas of some tools have such names everywhere."""
    plain = record(a={"$id": "#/properties/a"} | STRING)
    assert offers(plain, '{"a":"x"}')
    # Up to draft-07 it is only a mark.
    marked = {"$id": "#mark"} | record(b={"$ref": "#/definitions/A"})
    old = {"$schema": DRAFTS[7], "definitions": {"A": NULL}} | record(a=marked)
    assert offered(old, '{"a":{"b":null}}')


def test_draft_04_has_another_name_for_it() -> None:
    schema = {"$schema": DRAFTS[4], "definitions": {"A": NULL, "x": {
        "id": "x", "definitions": {"A": STRING, "B": {"$ref": "#/definitions/A"}}}}}  # fmt: skip
    found = schema | record(a={"$ref": "#/definitions/x/definitions/B"})
    assert offered(found, '{"a":"x"}', '{"a":null}') == '{"a":"x"}'
    part = {"$id": "x", "definitions": {"A": STRING}} | record(b={"$ref": "#/definitions/A"})
    named = {"$schema": DRAFTS[4], "definitions": {"A": NULL}} | record(a=part)
    assert offered(named, '{"a":{"b":null}}', '{"a":{"b":"x"}}') == '{"a":{"b":null}}'
