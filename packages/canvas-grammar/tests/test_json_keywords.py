"""Keywords one by one: each case names the mistake that it catches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from canvas_grammar_support.derivations import derives
from canvas_grammar_support.json_languages import drawn, language, offers, validator_of

NULL: dict[str, Any] = {"type": "null"}
STRING = {"type": "string"}
A_OR_B = {"properties": {"a": NULL, "b": NULL}, "type": "object"}
CLOSED = {"additionalProperties": False}
D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
SEVEN = {"minimum": 7, "maximum": 7, "type": "integer"}

# (schema, texts that it offers, texts that it does not, what would be wrong)
CASES: list[tuple[Any, list[str], list[str], str]] = [
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
    ({"const": 3, "minimum": 4, "type": ["integer"], "title": "t", "anyOf": [True]}, [], ["3"],
     "const: what stands beside it is lost"),
    (True, ["1", '{"a":[{}]}', "[[]]", "null", '"x"'], ["", "{"], "true: refused"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad", "mistake"), CASES, ids=[c[3] for c in CASES])
def test_offered_and_not(schema: Any, good: list[str], bad: list[str], mistake: str) -> None:
    if not good:  # nothing is left
        with pytest.raises(ValueError, match="no value"):
            language(schema)
        return
    node, validator = language(schema), validator_of(schema)
    assert [text for text in good if not derives(node, text)] == [], mistake
    assert [text for text in bad if derives(node, text)] == [], mistake
    for text in good:
        validator.validate(json.loads(text))
    for text in drawn(node, 40):
        validator.validate(json.loads(text))


def test_conditions_that_share_a_name_share_a_rule() -> None:
    """Else a schema of any JSON in 200 places is 200 schemas of any JSON."""
    one = language({"type": "object", "properties": {f"p{n}": {} for n in range(200)}})
    assert offers({"type": "object", "properties": {"p": {}}}, '{"p":{"q":[1]}}')
    seen: set[int] = set()
    ahead, rules = [one], set()
    while ahead:
        node = ahead.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        ahead += node.inside()
        if hasattr(node, "rule"):
            rules.add(id(node.rule))
            ahead.append(node.rule.body)
    assert len(rules) <= 8


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
