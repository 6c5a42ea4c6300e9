"""JSON schemas: what is offered validates with an independent validator, the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from canvas_grammar.automaton.compilation import Constraint, read_constraint
from canvas_grammar.grammar.context_free import reachable
from canvas_grammar.grammar.marks import Marks
from canvas_grammar.grammar.rules import Rule
from canvas_grammar.limits import ConstraintError
from canvas_grammar_support.derivations import derives, drawn
from canvas_grammar_support.helpers import record
from canvas_grammar_support.json_languages import LIMITS, language, offers, refusal, validator_of

NULL: dict[str, Any] = {"type": "null"}
STRING = {"type": "string"}
A_OR_B = {"properties": {"a": NULL, "b": NULL}, "type": "object"}
CLOSED = {"additionalProperties": False}
D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
SEVEN = {"minimum": 7, "maximum": 7, "type": "integer"}

LINKED = {
    "$defs": {"node": record(value={"type": "integer"}) | {"properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
    "$ref": "#/$defs/node",
}  # fmt: skip

# (schema, texts that it offers, texts that it does not)
ORDINARY: list[tuple[Any, list[str], list[str]]] = [
    (STRING, ['"ab"', '""', r'"\n\"\\\u001f"', '"é\U0001f600"'], ['"a', '"\n"', r'"\x"', "ab"]),
    ({"type": "string", "pattern": "b|^c"}, ['"abc"', '"b"', '"cx"', '"b\\n"'], ['"xc"', '""']),
    ({"type": "string", "pattern": r'^"\\\n$'}, [r'"\"\\\n"'], ['"n"']),
    ({"type": "integer"}, ["0", "-1", "120"], ["01", "1.0", "+1", "1234567890123456"]),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 2}, ["0", "1.999", "-0"], ["2", "-0.1"]),
    ({"type": ["null", "boolean"]}, ["null", "true"], ["0"]),
    ({"enum": ["a", 1, None, {"x": [1]}]}, ['"a"', "1", "null", '{"x": [1]}'], ["2"]),
    ({"type": "integer", "enum": ["a", 1, 2.0, True]}, ["1", "2"], ['"a"', "true"]),
    ({"const": "é"}, ['"é"'], ['"e"']),
    ({"type": "array", "items": STRING}, ["[]", '["a"]', '["a","b"]', '[ "a", "b" ]'], ['["a",]']),
    ({"type": "array", "items": NULL, "minItems": 1, "maxItems": 2},
     ["[null]", "[null, null]"], ["[]", "[null,null,null]"]),
    ({"type": "array", "items": False}, ["[]"], ["[null]"]),
    ({"type": "array", "prefixItems": [NULL, STRING], "items": {"type": "boolean"}},
     ["[]", "[null]", '[null, "a"]', '[null,"a",true]'], ['["a"]', '[null,"a","b"]']),
    (record(a=NULL, b=STRING), ['{"a": null, "b": "x"}', '{ "a":null,"b":"x" }'],
     ['{"b": "x", "a": null}', '{"a": null}', "{}"]),
    ({"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["b"]},
     ['{"b":null}', '{"a":null,"b":null}', '{"b":null,"c":null}', '{"a":null,"b":null,"c":null}',
      '{"b":null,"d":[1]}'],
     ["{}", '{"a":null}', '{,"b":null}', '{"b":null,}', '{"a":null,"c":null}',
      '{"b":null,"d":[1],"a":1}']),
    ({"properties": {"a": NULL, "b": NULL}},
     ["{}", '{"a":null}', '{"b":null}', '{"a":null,"b":null}', "1"], ['{"b":null,"a":null}']),
    ({"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
     ["{}", '{"x":true}', '{"x":true,"":false}'], ['{"x":1}', '{"x":true,"y":true,"z":true}']),
    ({"oneOf": [record(kind={"const": "a"}), record(kind={"const": "b"}, x=NULL)]},
     ['{"kind":"a"}', '{"kind":"b","x":null}'], ['{"kind":"b"}']),
    ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": NULL}}, ["null"], ["1"]),
    (LINKED, ['{"value":1}', '{"value":1,"next":{"value":2,"next":null}}'], ['{"next":null}']),
    (NULL | {"title": "x", "description": "y", "default": 3}, ["null"], []),
]  # fmt: skip
# The same, and what would be wrong otherwise.
MISTAKES: list[tuple[Any, list[str], list[str], str]] = [
    ({"allOf": [{"properties": {"a": NULL}}, {"properties": {"b": NULL}, "required": ["b"]}],
      "type": "object"}, ['{"a":null,"b":null}', '{"b":null}'], ['{"b":null,"a":null}', "{}"],
     "allOf: only the first schema counts"),
    ({"allOf": [{"properties": {"a": STRING}}], "properties": {"a": {"minLength": 2}},
      "required": ["a"], "type": "object"}, ['{"a":"xy"}'], ['{"a":"x"}', '{"a":1}'],
     "allOf: what is beside it is lost"),
    ({"$ref": "#/$defs/x", "minLength": 2, "$defs": {"x": STRING}}, ['"ab"'], ['"a"', "1"],
     "$ref: siblings are lost in draft-2020-12"),
    (D7 | {"$ref": "#/definitions/x", "minLength": 2, "definitions": {"x": STRING}},
     ['"a"'], ["1"], "$ref: siblings count up to draft-07"),
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], **A_OR_B},
     ['{"a":null}', '{"b":null}', '{"a":null,"b":null}'], ["{}", '{"c":1}'],
     "anyOf: the required names of options are lost beside properties"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], **A_OR_B},
     ['{"a":null}', '{"b":null}'], ["{}", '{"a":null,"b":null}'],
     "oneOf: a value fits both"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, ["1", "-5", '"x"'], ["4"],
     "oneOf: a value fits both (numbers)"),
    ({"oneOf": [{"properties": {"a": NULL}, **CLOSED}, {"properties": {"b": NULL}, **CLOSED}],
      "type": "object"}, ['{"a":null}', '{"b":null}'], ["{}"],
     "oneOf: the empty object fits both closed objects"),
    ({"not": {"required": ["a"]}, **A_OR_B}, ['{"b":null}', "{}"], ['{"a":null}'],
     "not: a forbidden property is offered"),
    ({"type": "string", "not": {"enum": ["x"]}}, ['"y"', '""'], ['"x"', r'"\u0078"'],
     "not: an excluded constant is offered"),
    ({"not": {"type": ["string", "object", "array", "null", "boolean"]}}, ["1", "1.5"], ['"x"'],
     "not: types are lost"),
    ({"type": "array", "not": {"items": NULL}}, ["[1]", "[null,1]"], ["[]", "[null]"],
     "not: items that are all right are offered"),
    ({"type": "object", "not": {"properties": {"a": NULL}}}, ['{"a":1}'], ["{}", '{"a":null}'],
     "not: an object without the property is offered"),
    ({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]},
      "else": {"required": ["c"]}, "type": "object",
      "properties": {"a": {"type": "integer"}, "b": NULL, "c": NULL}},
     ['{"a":1,"b":null}', '{"b":null}', '{"a":2,"c":null}'], ['{"a":1}', "{}", '{"a":2}'],
     "if: a missing property satisfies it"),
    ({"dependentRequired": {"a": ["b"]}, **A_OR_B}, ["{}", '{"b":null}', '{"a":null,"b":null}'],
     ['{"a":null}'], "dependentRequired: ignored"),
    ({"dependentSchemas": {"a": {"maxProperties": 1}}, **A_OR_B}, ['{"a":null}', '{"b":null}'],
     ['{"a":null,"b":null}'], "dependentSchemas: ignored"),
    (D7 | {"dependencies": {"a": ["b"], "b": {"required": ["a"]}}, **A_OR_B},
     ["{}", '{"a":null,"b":null}'], ['{"a":null}', '{"b":null}'], "dependencies: one form is lost"),
    ({"patternProperties": {"^x": NULL}, "additionalProperties": STRING, "type": "object"},
     ['{"xa":null}', '{"a":"b"}', '{"xa":null,"b":""}'], ['{"xa":"b"}', '{"a":null}'],
     "patternProperties: a name that matches is taken for an additional one"),
    ({"properties": {"xa": True}, "patternProperties": {"^x": NULL}, "type": "object"},
     ['{"xa":null}'], ['{"xa":1}'], "patternProperties: it does not hold for a named property"),
    ({"required": ["a"], "additionalProperties": NULL, "type": "object"}, ['{"a":null}'],
     ["{}", '{"a":1}', '{"b":null}'], "required: a name without a schema is lost"),
    ({"properties": {"a": NULL}, "type": "object"}, ['{"a":null}', '{"b":1}'], ['{"a":1}',
     r'{"\u0061":1}'], "additionalProperties: a free name repeats a named one"),
    ({"properties": {"\n": NULL}, "type": "object"}, [r'{"\n":null}'], [r'{"\n":1}',
     r'{"\u000a":1}', r'{"\u000A":1}'], "additionalProperties: another spelling of a named one"),
    ({"propertyNames": {"maxLength": 1}, "type": "object", "properties": {"ab": True}},
     ['{"a":1}', "{}"], ['{"ab":1}', '{"abc":1}'], "propertyNames: not for named properties"),
    ({"propertyNames": {"enum": ["a", "b"]}, "type": "object"}, ['{"a":1,"b":2}', "{}"],
     ['{"c":1}'], "propertyNames: enumerated names are lost"),
    ({"minProperties": 1, **A_OR_B, **CLOSED}, ['{"a":null}', '{"b":null}'], ["{}"],
     "minProperties: ignored beside properties"),
    ({"minProperties": 2, **A_OR_B, "required": ["a"]}, ['{"a":null,"b":null}', '{"a":null,"c":1}'],
     ['{"a":null}'], "minProperties: beyond the required ones"),
    ({"minProperties": 2, **A_OR_B}, ['{"a":null,"b":null}', '{"a":null,"c":1}'],
     ['{"c":1,"c":1}', '{"a":null}', "{}"], "minProperties: a repeated name counts twice"),
    ({"maxProperties": 1, **A_OR_B}, ["{}", '{"a":null}', '{"b":null}', '{"c":1}'],
     ['{"a":null,"b":null}', '{"a":null,"c":1}'], "maxProperties: ignored beside properties"),
    ({"contains": {"const": 1}, "type": "array"}, ["[1]", "[1,2]"], ["[]", "[2]"],
     "contains: ignored"),
    ({"contains": {"const": 1}, "minContains": 2, "maxContains": 2, "type": "array"},
     ["[1,1]", "[1,1,2]"], ["[1]", "[1,1,1]", "[1,1,2,1]"], "maxContains: ignored"),
    ({"contains": {"const": 1}, "minContains": 0, "type": "array"}, ["[]", "[2]"], [],
     "minContains: 0 still demands an item"),
    ({"contains": {"const": 1}, "prefixItems": [NULL], "type": "array"}, ["[null,1]"],
     ["[null]", "[1]"], "contains: placed where another item must be"),
    (D7 | {"items": [NULL, STRING], "additionalItems": False, "type": "array"},
     ["[]", "[null]", '[null,"a"]'], ['["a"]', '[null,"a",1]'], "items: a list is refused"),
    ({"prefixItems": [NULL], "type": "array"}, ["[]", "[null]", "[null,1]"], ["[1]"],
     "prefixItems: a shorter array is not offered"),
    ({"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "type": "array"}, ["[]", "[1,3]", "[2]"],
     ["[1,1]", "[4]"], "uniqueItems: an item is repeated"),
    ({"items": {"anyOf": [{"const": 1}, {"const": 1.0}]}, "uniqueItems": True, "type": "array"},
     ["[1]"], ["[1,1.0]"], "uniqueItems: equal numbers are written twice"),
    ({"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "type": "array", "minItems": 2},
     ["[1,3]", "[1,2,3]"], ["[2]", "[2,1,2]"], "uniqueItems: minItems is lost"),
    ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": NULL}}], "type": "object",
      "anyOf": [{"properties": {"b": NULL}, "required": ["b"]}, {}]},
     ['{"a":null}', '{"a":null,"b":null}'], ['{"c":1}', '{"b":1}'],
     "unevaluatedProperties: ignored, or blind for allOf"),
    ({"unevaluatedProperties": False, "not": {"not": {"properties": {"a": NULL}}},
      "type": "object"}, ["{}"], ['{"a":null}'],
     "unevaluatedProperties: what stands in not counts as evaluated"),
    ({"unevaluatedItems": NULL, "prefixItems": [STRING], "type": "array"}, ['["a",null]', "[]"],
     ['["a",1]', "[null]"], "unevaluatedItems: ignored"),
    ({"multipleOf": 1, **SEVEN}, ["7"], ["6", "8"], "bounds: one side is lost"),
    ({"enum": [{"a": 1}, {"a": 2}], "properties": {"a": {"minimum": 2}}}, ['{"a": 2}'],
     ['{"a": 1}'], "enum: what stands beside it is lost"),
    ({"oneOf": [{"const": [1]}, {"enum": [[1], [2]]}]}, ["[2]"], ["[1]"],
     "oneOf: constants inside of constants are not compared"),
    ({"enum": [{"a": 1}, {"a": 2}], "properties": {"a": {"const": 2}}}, ['{"a": 2}'],
     ['{"a": 1}'], "enum: a constant inside of it is not compared"),
    ({"type": "object", "not": {"enum": [{}, {"a": None}]}, **A_OR_B}, ['{"b":null}'],
     ["{}", '{"a":null}'], "not: objects that are constants are offered"),
    ({"dependentSchemas": {"a": False}, "type": "object"}, ["{}", '{"b":1}'], ['{"a":1}'],
     "additionalProperties: a name that must not occur is free"),
    (True, ["1", '{"a":[{}]}', "[[]]", "null", '"x"'], ["", "{"], "true: refused"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [*ORDINARY, *(pytest.param(*case, id=mistake) for *case, mistake in MISTAKES)],
)
def test_offered_and_not(schema: Any, good: list[str], bad: list[str]) -> None:
    node, validator = language(schema), validator_of(schema)
    assert [text for text in good if not derives(node, text)] == []
    assert [text for text in bad if derives(node, text)] == []
    for text in [*good, *drawn(node, 40)]:
        validator.validate(json.loads(text))


def test_conditions_that_share_a_name_share_a_rule() -> None:
    """Else a schema of any JSON in 200 places is 200 schemas of any JSON."""
    one = language({"type": "object", "properties": {f"p{n}": {} for n in range(200)}})
    assert len(list(reachable(Rule("whole", one)))) <= 9


def test_a_discriminator_of_many_options_is_read_quickly() -> None:
    """Not in time that grows with the product of all options."""
    options = [
        {"properties": {"kind": {"const": f"k{n}"}, "x": {"maximum": n}}, "required": ["kind"]}
        for n in range(30)
    ]
    schema = {"type": "object", "oneOf": options}
    assert offers(schema, '{"kind":"k3","x":2}') and not offers(schema, '{"kind":"k3","x":4}')
    chained = {"type": "object", "properties": {"kind": {"enum": [f"k{n}" for n in range(30)]}},
               "allOf": [{"if": {"properties": {"kind": {"const": f"k{n}"}}},
                          "then": {"required": [f"r{n}"]}} for n in range(30)]}  # fmt: skip
    assert offers(chained, '{"kind":"k3","r3":1}') and not offers(chained, '{"kind":"k3"}')


def test_a_character_that_a_pattern_excludes_is_not_offered() -> None:
    """U+0000 too: it stands only in strings without a pattern, so no pattern may require it."""
    schema = {"type": "string", "pattern": r"^[^\x00]$"}
    found = language(schema)
    for code in range(0x7F):
        text = json.dumps(chr(code))
        assert derives(found, text) == (code != 0), text
    assert offers({"type": "string"}, r'"\u0000a"')
    assert not offers({"type": "string", "pattern": "a"}, r'"\u0000a"')
    assert "allows no value" in refusal({"type": "string", "pattern": r"^\x00$"})
    assert not offers({"type": "string", "pattern": r"^[^\x00]*$"}, r'"\u0000"')


def test_counts_are_narrowed() -> None:
    """More than 256 items or unnamed properties are offered only where they are demanded."""
    many: dict[str, Any] = {"type": "array", "items": {"const": 1}, "maxItems": 10_000}
    for schema, least, most in ((many, 0, 256), (many | {"minItems": 300}, 300, 300)):
        found = language(schema)
        for count in (0, 256, 257, 300, 301):
            text = f"[{','.join('1' * count)}]"
            assert derives(found, text) == (least <= count <= most), count
    found = language({"type": "object", "properties": {"a": {"const": 1}}, "maxProperties": 10_000,
                      "additionalProperties": {"const": 2}})  # fmt: skip
    for count in (0, 256, 257):
        others = ",".join(f'"b{n}":2' for n in range(count))
        assert derives(found, f"{{{others}}}") == (count <= 256)
        assert count == 0 or derives(found, f'{{"a":1,{others}}}') == (count <= 256)


def test_recursion_does_not_end() -> None:
    text = '{"value":0}'
    for _ in range(12):
        assert offers(LINKED, text)
        text = f'{{"value":0,"next":{text}}}'
    assert not offers(LINKED, '{"value":0,"next":{}}')


@pytest.mark.parametrize(
    ("gap", "text", "accepted"),
    [
        ("", '{"a":null}', True),
        ("", '{"a": null}', False),
        (r"[ \n]*", '{\n  "a":\n null }', True),
    ],
)
def test_white_space_may_be_chosen(gap: str, text: str, accepted: bool) -> None:
    schema = record(a={"type": "null"})
    constraint = Constraint.from_value("json_schema", schema, whitespace=gap)
    assert derives(read_constraint(constraint, LIMITS, Marks())[0], text) == accepted
    for wrong in ("x", ".", r"\s"):
        with pytest.raises(ConstraintError, match="only JSON's"):
            unfit = Constraint.from_value("json_schema", schema, whitespace=wrong)
            read_constraint(unfit, LIMITS, Marks())
    with pytest.raises(ConstraintError, match="white space is settled for json_schema"):
        Constraint.from_value("regex", "a", whitespace=" ")
